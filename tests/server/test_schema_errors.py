"""Schemas that cannot be enforced whole, over HTTP: the answer says what does not hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from tests.server.conftest import DEMO

from penstock.engine.async_engine import AsyncEngine
from support.servers import Served, events_of, serving

# Two of four items are the same.
SCHEMA = {
    "type": "array",
    "items": {"type": "string", "pattern": "^(a|b|c)$"},
    "minItems": 4,
    "maxItems": 4,
    "uniqueItems": True,
}
TIGHT = {"json": SCHEMA, "unenforced": "check", "disable_any_whitespace": True}
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
ERROR = "has non-unique elements"


def at(event: Any, place: list[Any]) -> Any:
    """Part of an event, also as text; nothing of one that has none there."""
    if isinstance(event, str):
        event = {} if event == "[DONE]" else json.loads(event)
    for key in place:
        is_there = (isinstance(event, dict) and key in event) or (isinstance(event, list) and len(event) > key)
        event = event[key] if is_there else {}
    return event


def test_a_chat_completion_and_its_stream_say_it(client: OpenAI) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "unenforced": "check"}}
    fields: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "response_format": format, "temperature": 0}
    (choice,) = client.chat.completions.create(**fields).choices
    (error,) = choice.model_extra["schema_errors"]
    assert error.startswith("/: ")
    assert ERROR in error
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    assert [chunk.model_extra["schema_errors"] for chunk in chunks if "schema_errors" in chunk.model_extra] == [[error]]


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 40}, ["choices", 0]),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 40}, ["response"]),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 40}, ["delta"]),
    ],
)
def test_other_apis_say_it_in_whole_answers_and_in_the_end_of_streams(
    server: Served, path: str, body: dict[str, Any], place: list[Any]
) -> None:
    asked = {"model": "demo", "structured_outputs": TIGHT, "temperature": 0, **body}
    whole = server.post(path, asked).json
    (error,) = (whole["choices"][0] if "choices" in whole else whole)["schema_errors"]
    assert ERROR in error
    events = events_of(server.post(path, {**asked, "stream": True}).body)
    said = [part["schema_errors"] for event in events if "schema_errors" in (part := at(event, place))]
    assert said == [[error]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_rendered_requests_say_it(server: Served, stream: bool) -> None:
    asked = {"model": "demo", "prompt": "x", "max_tokens": 40, "structured_outputs": TIGHT, "stream": stream}
    (rendered,) = server.post("/v1/completions/render", asked).json
    reply = server.post("/inference/v1/generate", rendered)
    last = events_of(reply.body)[-2] if stream else reply.json
    assert ERROR in at(last, ["choices", 0])["schema_errors"][0]


def test_it_is_refused_where_the_model_may_call_tools_instead(server: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "unenforced": "check"}}
    asked = {"model": "demo", "messages": MESSAGES, "response_format": format, "tools": tools, "max_tokens": 1}
    error = server.post("/v1/chat/completions", asked).error
    assert error["message"].startswith('response_format.json_schema.unenforced="check" cannot be combined with')
    assert server.post("/v1/chat/completions", {**asked, "tool_choice": "none"}).status == 200


def test_a_server_may_check_all_answers_those_of_ollamas_clients_too() -> None:
    engine = AsyncEngine("demo", enable_multiprocessing=False, structured_outputs_unenforced="check", **DEMO)
    asked = {"model": "demo", "messages": MESSAGES, "format": SCHEMA, "options": {"temperature": 0}}
    with serving(engine) as served:
        whole = served.post("/api/chat", {**asked, "stream": False}).json
        lines = [json.loads(line) for line in served.post("/api/chat", asked).body.splitlines()]
    (error,) = whole["schema_errors"]
    assert ERROR in error
    assert [line["schema_errors"] for line in lines if "schema_errors" in line] == [[error]]
    assert lines[-1]["done"]


def test_it_is_refused_unless_it_is_asked_for(client: OpenAI) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    with pytest.raises(
        BadRequestError, match="response_format.json_schema.schema .*grammars cannot compare"
    ) as refused:
        client.chat.completions.create(model="demo", messages=MESSAGES, response_format=format)  # type: ignore[call-overload]
    assert 'unenforced="check"' in str(refused.value)
    format["json_schema"]["unenforced"] = "ignore"
    with pytest.raises(BadRequestError, match="response_format.json_schema.unenforced='ignore'"):
        client.chat.completions.create(model="demo", messages=MESSAGES, response_format=format)  # type: ignore[call-overload]


def test_an_answer_that_is_enforced_whole_says_nothing(client: OpenAI) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
    response = client.chat.completions.create(model="demo", messages=MESSAGES, response_format=format)
    assert "schema_errors" not in response.choices[0].model_extra
