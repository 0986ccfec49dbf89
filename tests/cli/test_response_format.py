"""The form of answers in OpenAI's batch format: response_format of each type, or a refusal by name."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.cli.batch_requests import read_batch_lines
from penstock.cli.requests import server_options
from penstock.contract import SamplingParams, StructuredOutputsParams

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETION: {"prompt": "hi"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "an object": ({"type": "json_object"}, {"json_object": True}),
    "a schema": (
        {"type": "json_schema", "json_schema": {"name": "x", "description": "y", "schema": SCHEMA, "strict": True}},
        {"json": SCHEMA},
    ),
    "an empty schema": ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, {"json": {}}),
    "a tag": (TAG, {"structural_tag": TAG}),
    "a grammar": ({"type": "grammar", "grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another type": ({"response_format": {"type": "xml"}}, "response_format={'type': 'xml'} is not valid. Allowed: "),
    "a text": ({"response_format": "json_object"}, "response_format='json_object' is not valid. Allowed: "),
    "an empty object": ({"response_format": {}}, "response_format={} is not valid. Allowed: "),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
    "an empty schema's place": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema is missing",
    ),
    "a schema of another type": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        "There is no field response_format.schema",
    ),
    "no dictionary": (
        {"response_format": {"type": "json_schema", "json_schema": [1]}},
        "response_format.json_schema=[1] is not valid",
    ),
    "two constraints": (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "There are response_format and structured_outputs",
    ),
    "two constraints, one of them by an older name": (
        {"response_format": {"type": "json_object"}, "guided_json": {}},
        "There are response_format and structured_outputs",
    ),
    "an empty choice": ({"extra_body": {"guided_choice": []}}, "structured_outputs.choice=[] is not valid"),
    "an extra body that is none": ({"extra_body": 5}, "extra_body=5 is not valid"),
}


def read(url: str, body: dict[str, Any], defaults: SamplingParams | None = None) -> Any:
    line = {"custom_id": "one", "method": "POST", "url": url, "body": {**PROMPTS[url], **body}}
    params = defaults or SamplingParams()
    return read_batch_lines([("line 1", line)], {}, params, params, server_options("demo", {}))["line 1"]


@pytest.mark.parametrize("url", PROMPTS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_becomes_the_constraint_that_it_is(name: str, url: str) -> None:
    given, meant = FORMATS[name]
    work = read(url, {"response_format": given})
    assert work.error is None
    assert work.sampling_params.structured_outputs == StructuredOutputsParams(**meant)


@pytest.mark.parametrize("url", PROMPTS)
def test_the_type_text_asks_for_no_form_whatever_the_default_is(url: str) -> None:
    defaults = SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    assert read(url, {"response_format": {"type": "text"}}, defaults).sampling_params.structured_outputs is None
    for body in ({}, {"response_format": None}):
        assert read(url, body, defaults).sampling_params.structured_outputs == defaults.structured_outputs


@pytest.mark.parametrize("body", [{"guided_json": {}}, {"extra_body": {"guided_json": {}}}], ids=str)
def test_older_names_and_extra_bodies_are_fields_of_the_body(body: dict[str, Any]) -> None:
    assert read(CHAT, body).sampling_params.structured_outputs == StructuredOutputsParams(json={})  # type: ignore[arg-type]
    assert read(CHAT, {"extra_body": {"top_k": 5, "temperature": 0.5}, "temperature": 1}).sampling_params.top_k == 5


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_format_is_refused_by_name(name: str) -> None:
    body, said = REFUSED[name]
    error = read(CHAT, body).error
    assert str(error).startswith(f"line 1: {said}")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_older_names_as_flags_say_which_parameter_it_is(command: str) -> None:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, [command, "--guided-json", "{}"])
    assert result.exit_code == 2
    assert "No such option: --guided-json. It is the parameter structured_outputs.json of a request" in result.output
    assert ("--json-schema" if command == "generate" else "penstock generate --help") in result.output
