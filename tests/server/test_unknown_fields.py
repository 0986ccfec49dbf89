"""Unknown fields of requests: harmless ones of other clients are ignored, others as the server's option says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from openai import BadRequestError, OpenAI

from penstock.errors import ConfigError
from penstock.server.http.unknown_fields import UnknownFields
from penstock.server.options import ServerOptions
from penstock.server.protocol.completion import CompletionRequest
from penstock.server.protocol.other_fields import HARMLESS_FIELDS
from support.servers import Served

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
BODY = {"prompt": "a", "cache_prompt": True, "keep_alive": "5m", "temprature": 1, "user": "me"}


def test_harmless_fields_of_other_clients_are_ignored_and_others_refused(client: OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="a", max_tokens=1, extra_body={"cache_prompt": True, "num_ctx": 4096}
    )
    assert answer.choices[0].finish_reason
    with pytest.raises(BadRequestError, match="There is no field mirostat"):
        client.completions.create(model="demo", prompt="a", extra_body={"num_ctx": 1, "mirostat": 2})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"])
def test_every_route_ignores_harmless_fields(server: Served, path: str) -> None:
    message = [{"role": "user", "content": "x"}]
    fields = {"/v1/responses": {"input": "x", "max_output_tokens": 1}, "/tokenize": {"prompt": "x"}}
    reply = server.post(path, {"keep_alive": 0, **fields.get(path, {"messages": message, "max_tokens": 1})})
    assert reply.status == 200, reply.body


@pytest.mark.parametrize(
    ("policy", "left", "logged"),
    [
        ("refuse", {"prompt", "temprature", "user"}, ["cache_prompt", "keep_alive"]),
        ("warn", {"prompt", "user"}, ["cache_prompt", "keep_alive", "temprature"]),
        ("ignore", {"prompt", "user"}, []),
    ],
)
def test_a_field_that_is_left_out_is_logged_once(
    policy: str, left: set[str], logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    unknown = UnknownFields(policy)
    with caplog.at_level(logging.INFO, logger="penstock.server.http.unknown_fields"):
        for _ in range(3):
            assert unknown.without(BODY, CompletionRequest).keys() == left
    assert len(caplog.messages) == len(logged)
    assert all(any(name in line for line in caplog.messages) for name in logged)


def test_a_client_cannot_fill_the_log_with_names(caplog: pytest.LogCaptureFixture) -> None:
    UnknownFields("warn").without({f"field{number}": 1 for number in range(1000)}, CompletionRequest)
    assert len(caplog.messages) == 201
    assert "further ones are not logged" in caplog.messages[-1]


def test_another_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown_fields='maybe' is not valid. Allowed: ignore, warn, refuse"):
        ServerOptions(served_model_name=("demo",), unknown_fields="maybe")


def test_harmless_fields_are_documented() -> None:
    text = PAGE.read_text()
    assert [name for name in sorted(HARMLESS_FIELDS) if f"`{name}`" not in text] == []
