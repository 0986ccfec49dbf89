"""vLLM's older names of structured output: what they ask for is what the newer ones do, and nothing is passed over."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock.cli.work import with_parameters
from penstock.config import vllm
from penstock.contract import SamplingParams, StructuredOutputsParams
from penstock.errors import InvalidParameter

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["<f>"]}
OLD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a schema": ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    "a schema as text": ({"guided_json": "{}"}, {"json": {}}),
    "an empty schema": ({"guided_json": {}}, {"json": {}}),
    "a schema that allows nothing": ({"guided_json": False}, {"json": False}),
    "a regular expression": ({"guided_regex": "a+"}, {"regex": "a+"}),
    "choices": ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    "a grammar": ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    "any object": ({"guided_json_object": True}, {"json_object": True}),
    "a tag": ({"structural_tag": TAG}, {"structural_tag": TAG}),
    "whitespace": (
        {"guided_json": {}, "guided_whitespace_pattern": " ?"},
        {"json": {}, "whitespace_pattern": " ?"},
    ),
    "what asks for nothing beside": (
        {"guided_json": {}, "guided_regex": None, "guided_json_object": False, "guided_decoding_backend": "xgrammar"},
        {"json": {}},
    ),
    "a dictionary": ({"guided_decoding": {"regex": "a"}}, {"regex": "a"}),
    "its own class": ({"guided_decoding": StructuredOutputsParams(regex="a")}, {"regex": "a"}),
}
EMPTY: dict[str, tuple[dict[str, Any], str]] = {
    "choices": ({"guided_choice": []}, r"^structured_outputs.choice=\[\] is not valid"),
    "a regular expression": ({"guided_regex": ""}, "^structured_outputs.regex='' is not valid"),
    "a grammar": ({"guided_grammar": ""}, "^structured_outputs.grammar='' is not valid"),
    "a schema as text": ({"guided_json": ""}, "^structured_outputs.json is not valid JSON"),
    "a dictionary": ({"guided_decoding": {}}, "^structured_outputs has no constraint. Allowed: exactly one of json,"),
    "by its new name": ({"structured_outputs": {}}, "^structured_outputs has no constraint"),
    "whitespace alone": ({"guided_whitespace_pattern": " "}, "^structured_outputs has no constraint"),
    "two constraints": ({"guided_json": {}, "guided_regex": "a"}, "^structured_outputs has json and regex"),
    "two names": (
        {"guided_json": {}, "structured_outputs": {"regex": "a"}},
        "^structured_outputs is given by several names",
    ),
    "two old names": (
        {"guided_json": {}, "guided_decoding": {"regex": "a"}},
        "^structured_outputs is given by several names",
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_older_names_ask_for_the_same(name: str) -> None:
    given, meant = OLD[name]
    expected = SamplingParams(structured_outputs=StructuredOutputsParams(**meant))
    assert SamplingParams(**given) == expected
    assert SamplingParams.from_optional(**given, seed=None) == SamplingParams.from_optional(
        structured_outputs=StructuredOutputsParams(**meant)
    )
    assert with_parameters(SamplingParams(), given, SamplingParams.__struct_fields__, ()) == expected


@pytest.mark.parametrize("name", EMPTY)
def test_what_asks_for_no_constraint_or_two_is_refused_by_the_new_name(name: str) -> None:
    given, said = EMPTY[name]
    with pytest.raises(InvalidParameter, match=said):
        SamplingParams(**given)


@pytest.mark.parametrize("name", vllm.table().other_names["parameters"])
def test_a_parameter_that_is_none_asks_for_nothing(name: str) -> None:
    assert SamplingParams(**{name: None}) == SamplingParams()


def test_the_class_has_its_older_name_and_options() -> None:
    params = penstock.GuidedDecodingParams(json={}, disable_fallback=True)  # type: ignore[attr-defined]
    assert params == StructuredOutputsParams(json={})
    with pytest.raises(InvalidParameter, match=r"no parameter 'regexp'.*Did you mean regex\?"):
        StructuredOutputsParams(regexp="a")  # type: ignore[call-arg]


def test_a_field_of_the_class_keeps_its_name_beside_a_wrong_one() -> None:
    with pytest.raises(InvalidParameter, match="no parameter 'zebra'"):
        StructuredOutputsParams(structural_tag=TAG, zebra=1)  # type: ignore[call-arg, arg-type]
