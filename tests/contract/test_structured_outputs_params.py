"""A constraint is one, well formed, and plain data, whatever it was given as."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from penstock.contract import SamplingParams, StructuredOutputsParams, decode, encode
from penstock.errors import InvalidParameter


class City(BaseModel):
    name: str
    people: int = 0


def test_a_schema_is_kept_as_text_in_one_form_whatever_it_was_given_as() -> None:
    schema = {"type": "object", "properties": {"ü": {"minimum": 1.5}, "a": True}}
    text = '{"type":"object","properties":{"ü":{"minimum":1.5},"a":true}}'
    for given in (schema, json.dumps(schema), json.dumps(schema, indent=2, ensure_ascii=False)):
        assert StructuredOutputsParams(json=given).json == text  # type: ignore[arg-type]
    for given in (City, City(name="Bern")):
        kept = StructuredOutputsParams(json=given).json  # type: ignore[arg-type]
        assert kept is not None
        assert json.loads(kept) == City.model_json_schema()
    assert StructuredOutputsParams(json=False).json == "false"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "has no constraint"),
        ({"json": {}, "regex": "a"}, "has json and regex"),
        ({"json_object": False}, "has no constraint"),
        ({"json_object": 1}, "structured_outputs.json_object=1"),
        ({"json": '{"type": '}, "structured_outputs.json is not valid JSON"),
        ({"json": '{"type": "string", "type": "null"}'}, "an object has 'type' twice"),
        ({"json": '{"minimum": NaN}'}, "NaN is not a number"),
        ({"json": {"minimum": float("inf")}}, "not valid JSON"),
        ({"json": {"a": {1, 2}}}, "not valid JSON"),
        ({"json": {"a": 1, 1: {"1": 2, 1: 3}}}, "twice"),
        ({"json": {"const": "\ud800"}}, "is not a character"),
        ({"json": "[]"}, "Allowed: a JSON schema"),
        ({"json": 5}, "Allowed: a JSON schema"),
        ({"regex": ""}, "a text that is not empty"),
        ({"regex": 5}, "a text that is not empty"),
        ({"regex": "\ud800"}, "is not a character"),
        ({"grammar": ""}, "a text that is not empty"),
        ({"choice": []}, "a list of texts"),
        ({"choice": "yes"}, "a list of texts"),
        ({"choice": ["yes", ""]}, "a list of texts"),
        ({"structural_tag": "true"}, "a structural tag"),
        ({"regex": "a", "whitespace_pattern": " "}, "only with json, json_object, structural_tag"),
        ({"choice": ["a"], "disable_any_whitespace": True}, "only with json"),
        ({"regex": "a", "disable_additional_properties": False}, "only with json"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "not together"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match="structured_outputs") as refused:
        StructuredOutputsParams(**fields)
    assert said in str(refused.value)


def test_parameters_take_the_fields_as_a_dictionary() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a", "b", "a"]})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputsParams(choice=("a", "b"))
    assert params.structured_outputs.constraint == "choice"
    assert SamplingParams.from_dict({"structured_outputs": {"json": {"type": "null"}}}) == SamplingParams(
        structured_outputs=StructuredOutputsParams(json='{"type":"null"}')
    )


def test_a_constraint_survives_being_sent() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=("a", "b")))
    assert decode(encode(params), SamplingParams) == params
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
