"""Requests that turn out not to be valid once they run: the client's error, not the server's."""

from __future__ import annotations

from typing import Any

import pytest
from openai import APIError, BadRequestError, OpenAI

from support.servers import Served

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
UNSATISFIABLE = {"type": "integer", "minimum": 3, "maximum": 2}


def schema_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "demo", "messages": MESSAGES, "max_tokens": 60, **fields})


def num_ended(server: Served) -> dict[str, int]:
    return dict(server.engine.request_totals().num_ended)


def test_a_schema_that_nothing_satisfies_is_the_client_s_error(server: Served, client: OpenAI) -> None:
    before = num_ended(server)
    with pytest.raises(BadRequestError, match="Unsatisfiable schema") as refused:
        chat(client, response_format=schema_format(UNSATISFIABLE))
    assert refused.value.param == "response_format.json_schema.schema"
    after = num_ended(server)
    assert (after["invalid"] - before["invalid"], after["error"] - before["error"]) == (1, 0)


def test_parameters_that_leave_no_token_are_the_client_s_error(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="leave no token that could come next"):
        chat(client, extra_body={"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [5]})


def test_a_schema_that_is_nested_too_deeply_is_the_client_s_error(client: OpenAI) -> None:
    schema: Any = {"type": "null"}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(BadRequestError, match="what cannot be enforced"):
        chat(client, response_format=schema_format(schema))


def test_a_stream_of_an_unsatisfiable_schema_has_an_error_of_the_client(client: OpenAI) -> None:
    with pytest.raises(APIError, match="Unsatisfiable schema") as refused:
        list(chat(client, response_format=schema_format(UNSATISFIABLE), stream=True))
    assert refused.value.type == "invalid_request_error"


def test_the_messages_api_calls_it_an_invalid_request(server: Served) -> None:
    output = {"format": {"type": "json_schema", "schema": UNSATISFIABLE}}
    body = {"model": "demo", "max_tokens": 8, "messages": MESSAGES, "output_config": output}
    reply = server.request("POST", "/v1/messages", body)
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("budget", [2**31, 2**63])
def test_a_thinking_budget_beyond_its_range_is_refused_by_name(client: OpenAI, budget: int) -> None:
    with pytest.raises(BadRequestError, match="0 to 2147483647") as refused:
        chat(client, extra_body={"thinking_token_budget": budget})
    assert refused.value.param == "thinking_token_budget"
