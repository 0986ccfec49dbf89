"""Schemas that cannot be enforced whole, over HTTP: the answer says what does not hold."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from support.servers import Served

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


def test_a_chat_completion_and_its_stream_say_it(client: OpenAI) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "unenforced": "check"}}
    fields: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "response_format": format, "temperature": 0}
    (choice,) = client.chat.completions.create(**fields).choices
    (error,) = choice.model_extra["schema_errors"]
    assert error.startswith("/: ")
    assert ERROR in error
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    assert [chunk.model_extra["schema_errors"] for chunk in chunks if "schema_errors" in chunk.model_extra] == [[error]]


def test_a_completion_says_it(client: OpenAI) -> None:
    response = client.completions.create(
        model="demo", prompt="x", max_tokens=40, extra_body={"structured_outputs": TIGHT}
    )
    assert ERROR in response.choices[0].model_extra["schema_errors"][0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 40}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 40}),
    ],
)
def test_other_apis_say_it_of_the_whole_answer(server: Served, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, {"model": "demo", "structured_outputs": TIGHT, **body}).json
    assert ERROR in answer["schema_errors"][0]


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
