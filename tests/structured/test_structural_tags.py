"""Structural tags with composed formats, in XGrammar's notation."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.constraints import allows, matcher_for, may_begin

from penstock.contract import StructuredOutputsParams
from penstock.errors import InvalidParameter
from penstock.structured.constraint_check import check_constraint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": SCHEMA}


def tag(name: str) -> dict[str, Any]:
    return {"begin": f"<{name}>", "content": JSON, "end": f"</{name}>"}


def separated(**fields: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [tag("f"), tag("g")], "separator": ", ", **fields}


def triggered(**fields: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": [tag("f"), tag("g")], **fields}


ONE, OTHER = '<f>{"a":1}</f>', '<g>{"a": 2}</g>'
FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a text": ({"type": "const_string", "value": "a/b\n"}, ["a/b\n"], ["a/b", ""]),
    "no text": ({"type": "const_string", "value": ""}, [""], ["a"]),
    "a schema": (JSON, ['{"a":1}'], ["{}", '{"a":1,"b":2}']),
    "a pattern": ({"type": "regex", "pattern": "[a/]{2}"}, ["a/", "aa"], ["a", "aaa"]),
    "a sequence": (
        {"type": "sequence", "elements": [{"type": "regex", "pattern": "a?"}, JSON]},
        ['{"a":1}', 'a{"a":1}'],
        ["a", 'aa{"a":1}'],
    ),
    "alternatives": (
        {"type": "or", "elements": [{"type": "const_string", "value": "no"}, JSON]},
        ["no", '{"a":1}'],
        ["", 'no{"a":1}'],
    ),
    "a tag": ({"type": "tag", **tag("f")}, [ONE], [OTHER, ONE + ONE, '{"a":1}']),
    "any text": ({"type": "any_text"}, ["", "a\n"], []),
    "any text in a tag": (
        {"type": "tag", "begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"},
        ["<f></f>", "<f>a</</f>"],
        ["<f>", "<f></f></f>"],
    ),
    "tags that may come": (separated(), ["", ONE, f"{ONE}, {OTHER}, {ONE}"], [ONE + OTHER, f"{ONE}, ", "x"]),
    "tags that must come": (separated(at_least_one=True), [ONE, f"{ONE}, {OTHER}"], [""]),
    "one tag at most": (separated(stop_after_first=True), ["", OTHER], [f"{ONE}, {OTHER}"]),
    "one tag": (separated(at_least_one=True, stop_after_first=True), [ONE], ["", f"{ONE}, {OTHER}"]),
    "tags in free text": (triggered(), ["", "<", f"a {ONE} b {OTHER}\n"], ["<f", "a <f>{}</f>", f"{ONE}<g"]),
    "a tag at the end of free text": (triggered(stop_after_first=True), ["", "a", f"a {ONE}"], ["<f", f"{ONE} b"]),
}


@pytest.mark.parametrize(("format", "allowed", "refused"), FORMATS.values(), ids=FORMATS)
def test_a_format_allows_its_texts_and_no_others(
    format: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    matcher = matcher_for(structural_tag={"type": "structural_tag", "format": format})
    assert [text for text in allowed if not allows(matcher, text)] == []
    assert [text for text in refused if allows(matcher, text)] == []


def test_schemas_of_formats_are_open_where_that_is_asked_for() -> None:
    matcher = matcher_for(structural_tag={"format": JSON}, disable_additional_properties=False)
    assert may_begin(matcher, '{"a":1,"b":2')


DEEP: dict[str, Any] = JSON
for _ in range(40):
    DEEP = {"type": "or", "elements": [DEEP]}


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ({"type": "any"}, "/format={'type': 'any'} is not valid. Allowed: .*const_string, json_schema"),
        ({"type": "const_string", "value": 1}, "/format/value=1 is not valid. Allowed: text"),
        ({"type": "regex", "pattern": "(?=a)"}, "/format/pattern: "),
        ({"type": "json_schema", "json_schema": {"$dynamicRef": "#a"}}, "/format/json_schema: "),
        ({"type": "or", "elements": []}, r"/format/elements=\[\] is not valid"),
        ({"type": "sequence", "elements": [{"type": "or"}]}, "/format/elements/0/elements=None"),
        ({"type": "tag", **tag("f"), "name": "f"}, "/format has a field 'name'"),
        (separated(tags=[{"type": "or"}]), "/format/tags/0="),
        (separated(at_least_one="yes"), "/format/at_least_one='yes' is not valid. Allowed: True or False"),
        (triggered(triggers=["<f"]), "/format/tags/1/begin='<g>'"),
        (triggered(at_least_one=True), "/format/at_least_one=True .* tags_with_separator"),
        ({"type": "sequence", "elements": [{"type": "any_text"}]}, "/format/elements=.*any_text as the content"),
        ({"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": ""}, "/format/end=''"),
        (DEEP, "is nested too deeply"),
    ],
)
def test_a_format_that_cannot_be_followed_is_refused_with_its_place(format: dict[str, Any], message: str) -> None:
    params = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": format})  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match=message):
        check_constraint(params, 1 << 20)
