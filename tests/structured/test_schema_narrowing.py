"""By default objects are closed and everything is bounded; outputs are valid for the given schema."""

from __future__ import annotations

import json
import zlib
from typing import Any

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel

from penstock.structured.schema_narrowing import (
    MAX_DIGITS,
    MAX_FRACTION_DIGITS,
    MAX_ITEMS,
    MAX_LENGTH,
    MAX_PROPERTIES,
    DefaultBounds,
    narrowed,
)
from support.constraints import allows, matcher_for, random_output, schema_matcher

A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
OBJECT = {"type": "object"}
NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}

# By name: a schema, what is generated of it, and what is valid but not generated.
CLOSED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "properties": ({**OBJECT, **A}, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    "an object inside": ({**OBJECT, "properties": {"o": A}}, [{"o": {"a": 1}}], [{"o": {"b": 1}}]),
    "required alone": ({**OBJECT, "required": ["a"]}, [{"a": [1]}], [{"a": 1, "b": 1}]),
    "patterns": ({**OBJECT, "patternProperties": {"^x": {"type": "integer"}}}, [{}, {"x1": 1}], [{"b": 1}]),
    "all of": ({**OBJECT, "allOf": [A, B]}, [{"a": 1, "b": 2}, {"b": 1}], [{"c": 1}]),
    "beside all of": ({**OBJECT, **A, "allOf": [B]}, [{"a": 1, "b": 2}], [{"c": 1}]),
    "any of": (
        {"anyOf": [{**OBJECT, **A, "required": ["a"]}, {**OBJECT, **B}]},
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 2}],
    ),
    "beside any of": (
        {**OBJECT, **A, "anyOf": [{"required": ["a"]}, {**B, "required": ["b"]}]},
        [{"a": 1}, {"a": 1, "b": 2}, {"b": 2}],
        [{"a": 1, "c": 3}],
    ),
    "one of": (
        {
            "oneOf": [
                {**OBJECT, "properties": {"k": {"const": kind}, kind: {"type": "integer"}}, "required": ["k"]}
                for kind in "ab"
            ]
        },
        [{"k": "a", "a": 1}, {"k": "b", "b": 1}],
        [{"k": "a", "b": 1}],
    ),
    "a reference": (
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        [{"v": 1, "next": {"v": 2}}],
        [{"next": {"c": 1}}],
    ),
    "a reference with siblings": (
        {"$defs": {"node": NODE}, **OBJECT, **B, "$ref": "#/$defs/node"},
        [{"b": 1, "v": 2, "next": {}}, {"v": 1}],
        [{"c": 1}, {"next": {"b": 1}}],
    ),
    "at least one property": ({**OBJECT, **A, "minProperties": 1}, [{"a": 1}], []),
    "at most one property": (
        {**OBJECT, "properties": {**A["properties"], **B["properties"]}, "maxProperties": 1},
        [{"b": 1}],
        [],
    ),
    "unevaluated properties that are none": ({**OBJECT, **A, "unevaluatedProperties": False}, [{"a": 1}], []),
}

# Schemas that say something of further properties, or that would have nothing left.
OPEN: dict[str, tuple[Any, list[Any]]] = {
    "additional properties": ({**OBJECT, **A, "additionalProperties": True}, [{"a": 1, "b": [{"c": 1}]}]),
    "typed ones": ({**OBJECT, "additionalProperties": {"type": "integer"}}, [{}, {"b": 1, "c": 2}]),
    "additional ones beside all of": ({**OBJECT, **A, "additionalProperties": True, "allOf": [B]}, [{"a": 1, "c": 2}]),
    "unevaluated properties": ({**OBJECT, **A, "unevaluatedProperties": True}, [{"a": 1, "b": 2}]),
    "no property named": (OBJECT, [{}, {"a": {"b": [1, {"c": None}]}}]),
    "an empty list of properties": ({**OBJECT, "properties": {}, "required": []}, [{"a": 1}]),
    "a property that may not be": ({**OBJECT, "properties": {"a": False}}, [{}, {"b": 1}]),
    "anything": (True, [1, {"a": []}, "x"]),
    "at least one of any name": ({**OBJECT, "minProperties": 1}, [{"a": 1}]),
    "a constant with more than is listed": ({**A, "const": {"a": 1, "b": 2}}, [{"a": 1, "b": 2}]),
    "a constant beside all of": ({"allOf": [A], "enum": [{"c": 1}, 5]}, [{"c": 1}, 5]),
    "a number with many digits": (
        {"type": "number", "minimum": 0.12345678901, "maximum": 0.12345678909},
        [0.123456789055],
    ),
    "a number beyond the bound": ({"type": "integer", "minimum": 2 * 10**15}, [2 * 10**15, 3 * 10**15]),
    "a longer string": ({"type": "string", "minLength": MAX_LENGTH + 5}, ["x" * (MAX_LENGTH + 5)]),
    "more items": ({"type": "array", "minItems": MAX_ITEMS + 1, "items": {"const": 1}}, [[1] * (MAX_ITEMS + 1)]),
    "a pattern": ({"type": "string", "pattern": "^x*$"}, ["x" * (MAX_LENGTH + 1)]),
    "a length of its own": ({"type": "string", "maxLength": 2 * MAX_LENGTH}, ["x" * (2 * MAX_LENGTH)]),
}


@pytest.mark.parametrize("name", CLOSED)
def test_objects_have_no_properties_that_the_schema_does_not_name(name: str) -> None:
    schema, generated, not_generated = CLOSED[name]
    validator, matcher = jsonschema.Draft202012Validator(schema), schema_matcher(schema)
    assert all(map(validator.is_valid, [*generated, *not_generated]))
    assert [one for one in generated if not allows(matcher, json.dumps(one))] == []
    assert [one for one in not_generated if allows(matcher, json.dumps(one))] == []
    for one in not_generated:
        assert allows(schema_matcher(schema, disable_additional_properties=False), json.dumps(one))


@pytest.mark.parametrize("name", OPEN)
def test_what_the_schema_says_comes_before_the_default(name: str) -> None:
    schema, generated = OPEN[name]
    matcher = schema_matcher(schema)
    assert all(map(jsonschema.Draft202012Validator(schema).is_valid, generated))
    assert [one for one in generated if not allows(matcher, json.dumps(one))] == []


@pytest.mark.parametrize("name", [*CLOSED, *OPEN])
def test_what_is_generated_is_valid_for_the_schema_as_it_was_given(name: str) -> None:
    schema = {**CLOSED, **OPEN}[name][0]
    validator, matcher = jsonschema.Draft202012Validator(schema), schema_matcher(schema)
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    for text in filter(None, [random_output(matcher, generator, max_tokens=150) for _ in range(5)]):
        validator.validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "longest", "too_long"),
    [
        ({"type": "string"}, f'"{"x" * MAX_LENGTH}"', f'"{"x" * (MAX_LENGTH + 1)}"'),
        ({}, f'"{"x" * MAX_LENGTH}"', f'"{"x" * (MAX_LENGTH + 1)}"'),
        ({"type": "array"}, f"[{','.join(['1'] * MAX_ITEMS)}]", f"[{','.join(['1'] * (MAX_ITEMS + 1))}]"),
        ({"type": "integer"}, "-" + "9" * MAX_DIGITS, "-1" + "0" * MAX_DIGITS),
        ({"type": "integer", "minimum": 0}, "9" * MAX_DIGITS, "1" + "0" * MAX_DIGITS),
        ({"type": "number"}, f"0.{'1' * MAX_FRACTION_DIGITS}", f"0.{'1' * (MAX_FRACTION_DIGITS + 1)}"),
        ({"type": "number"}, "1.5", "1.5e3"),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            json.dumps({str(number): 1 for number in range(MAX_PROPERTIES)}),
            json.dumps({str(number): 1 for number in range(MAX_PROPERTIES + 1)}),
        ),
        ({"type": "object"}, json.dumps({"x" * 256: 1}), json.dumps({"x" * 257: 1})),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, f'"{"x" * MAX_LENGTH}"', f'"{"x" * (MAX_LENGTH + 1)}"'),
    ],
    ids=str,
)
def test_what_has_no_bound_gets_one(schema: Any, longest: str, too_long: str) -> None:
    matcher = schema_matcher(schema)
    assert allows(matcher, longest)
    assert not allows(matcher, too_long)
    assert allows(schema_matcher(schema, disable_additional_properties=False), too_long)


def test_schemas_of_a_structural_tag_close_as_well() -> None:
    tag = {"structures": [{"begin": "<f>", "schema": {**OBJECT, **A}, "end": "</f>"}], "triggers": ["<f>"]}
    assert allows(matcher_for(structural_tag=tag), '<f>{"a":1}</f>')
    assert not allows(matcher_for(structural_tag=tag), '<f>{"b":1}</f>')
    assert allows(matcher_for(structural_tag=tag, disable_additional_properties=False), '<f>{"b":1}</f>')


class _Line(BaseModel):
    sku: str
    price: float


class _Order(BaseModel):
    number: int
    lines: list[_Line]
    note: str | None = None


def test_a_model_of_pydantic_has_its_fields_and_no_others() -> None:
    matcher = schema_matcher(_Order)
    text = json.dumps({"number": 1, "lines": [{"sku": "x", "price": 1.5}], "note": None})
    assert allows(matcher, text)
    assert not allows(matcher, text.replace('"note"', '"other"'))
    assert not allows(matcher, text.replace('"price": 1.5', '"price": 1.5, "vat": 1'))


def test_short_contexts_have_smaller_bounds() -> None:
    assert DefaultBounds.within(8192) == DefaultBounds() == (MAX_LENGTH, MAX_ITEMS)
    assert DefaultBounds.within(1024) == (128, 32)
    small = narrowed(
        {"type": "object", "properties": {"s": {"type": "string"}, "a": {"type": "array"}}}, DefaultBounds(5, 2)
    )
    assert small["properties"]["s"]["maxLength"] == 5
    assert small["properties"]["a"]["maxItems"] == 2
    assert narrowed({"type": "string", "minLength": 9}, DefaultBounds(5, 2))["maxLength"] == 9
