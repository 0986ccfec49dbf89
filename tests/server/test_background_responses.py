"""Responses in the background, with OpenAI's client: read, cancelled, deleted, and lost with their front end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from tests.server.conftest import DEMO

from penstock.engine.async_engine import AsyncEngine
from penstock.server.options import ServerOptions
from penstock.server.responses.store import ResponseStore, StoredResponse
from support.servers import Served, serving
from support.waiting import wait_until

LONG: dict[str, Any] = {"max_output_tokens": 900, "extra_body": {"ignore_eos": True}}


def respond(client: OpenAI, **fields: Any) -> Any:
    given = {"model": "demo", "input": "Who are you?", "max_output_tokens": 20, "temperature": 0}
    return client.responses.create(**{**given, **fields})


def ended(client: OpenAI, id: str) -> Any:
    wait_until(lambda: client.responses.retrieve(id).status not in ("queued", "in_progress"), "the response ends")
    return client.responses.retrieve(id)


def test_the_answer_is_that_of_a_response_whose_client_waits(client: OpenAI) -> None:
    expected = respond(client)
    begun = respond(client, background=True)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    response = ended(client, begun.id)
    assert (response.status, response.id) == (expected.status, begun.id)
    assert response.output_text == expected.output_text
    assert response.usage == expected.usage
    following = respond(client, previous_response_id=begun.id)
    assert following.usage.input_tokens > response.usage.input_tokens


def test_one_that_runs_is_cancelled_once(client: OpenAI, server: Served) -> None:
    begun = respond(client, background=True, **LONG)
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.cancel(begun.id).status == "cancelled"
    wait_until(lambda: server.engine.get_num_unfinished_requests() == 0, "its request is aborted")
    assert client.responses.retrieve(begun.id).status == "cancelled"
    with pytest.raises(BadRequestError, match="has no answer to go on with: it is cancelled"):
        respond(client, previous_response_id=begun.id)
    done = respond(client)
    with pytest.raises(BadRequestError, match="has ended: it is"):
        client.responses.cancel(done.id)


def test_one_that_runs_is_deleted(client: OpenAI, server: Served) -> None:
    begun = respond(client, background=True, **LONG)
    client.responses.delete(begun.id)
    wait_until(lambda: server.engine.get_num_unfinished_requests() == 0, "its request is aborted")
    with pytest.raises(NotFoundError):
        client.responses.retrieve(begun.id)


def test_a_deadline_fails_the_response(client: OpenAI) -> None:
    body = {"ignore_eos": True, "timeout": 0.05}
    begun = respond(client, background=True, max_output_tokens=900, extra_body=body)
    response = ended(client, begun.id)
    assert response.status == "failed"
    assert "timeout=0.05" in response.error.message


@pytest.mark.parametrize(("fields", "why"), [({"stream": True}, "without stream"), ({"store": False}, "store=true")])
def test_it_needs_the_store_and_no_stream(client: OpenAI, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequestError, match=why):
        respond(client, background=True, **fields)


def test_a_refused_request_is_refused_at_once(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="temperature=-1"):
        respond(client, background=True, temperature=-1)


def test_one_that_its_server_lost_has_failed(tmp_path: Path) -> None:
    options = {"response_store_dir": str(tmp_path)}
    store = ResponseStore(ServerOptions(served_model_name=("demo",), **options))
    body = {"id": "resp_" + "0" * 32, "status": "in_progress", "output": [], "object": "response"}
    store.put(StoredResponse(body, []))
    engine = AsyncEngine("demo", enable_multiprocessing=False, **DEMO)
    with serving(engine, **options) as served, served.client() as client:
        with store.running(body["id"]):
            assert client.responses.retrieve(body["id"]).status == "in_progress"
        response: Any = client.responses.retrieve(body["id"])
        assert (response.status, response.error.code) == ("failed", "server_error")


def test_without_a_store_it_is_refused() -> None:
    engine = AsyncEngine("demo", enable_multiprocessing=False, **DEMO)
    with (
        serving(engine, max_stored_responses=0) as served,
        served.client() as client,
        pytest.raises(BadRequestError, match="max_stored_responses"),
    ):
        respond(client, background=True)
