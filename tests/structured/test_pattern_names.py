"""Patterns of names beside listed names: both are enforced, and an output always finds its end."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from penstock.errors import InvalidParameter
from penstock.structured.pattern_names import without_empty_patterns
from support.constraints import allows, matcher_for, may_begin, random_output, schema_matcher

ESCAPES = 'nrbtf\\"'
INTEGER, BOOLEAN = {"type": "integer"}, {"type": "boolean"}
OBJECT = {"type": "object", "additionalProperties": False}
A = {"properties": {"a": BOOLEAN}}
# By name: a schema, and a text behind which only the end of the object may come.
COMPLETE = {
    "a pattern of a listed name": ({**OBJECT, **A, "patternProperties": {"^a$": BOOLEAN}}, '{"a":true'),
    "a pattern of a required name": (
        {**OBJECT, "required": ["a"], "patternProperties": {"^a$": BOOLEAN}},
        '{"a":true',
    ),
    "a pattern of several listed names": (
        {**OBJECT, "properties": {"a": BOOLEAN, "b": BOOLEAN}, "patternProperties": {"^(a|b)$": BOOLEAN}},
        '{"a":true,"b":true',
    ),
    "a pattern in another schema": (
        {"type": "object", "allOf": [A, {"additionalProperties": False, "patternProperties": {"^a$": BOOLEAN}}]},
        '{"a":true',
    ),
    "a pattern of what cannot be written": (
        {**OBJECT, **A, "patternProperties": {"^\\x01+$": BOOLEAN}},
        '{"a":true',
    ),
    "additional names that patterns refuse": (
        {**A, "type": "object", "patternProperties": {"^[^a]": False, "^a[^a]": False, "^aa": False, "^$": False}},
        '{"a":true',
    ),
    "a value that cannot be written": (
        {**OBJECT, "properties": {"a": BOOLEAN, "b": {"type": "string", "pattern": "^\\x01$"}}},
        '{"a":true',
    ),
}


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("name", COMPLETE)
def test_no_comma_comes_where_no_property_can_follow(name: str, is_closed: bool) -> None:
    schema, text = COMPLETE[name]
    matcher = schema_matcher(schema, disable_additional_properties=is_closed)
    assert allows(matcher, f"{text}}}")
    assert not may_begin(matcher, f"{text},")


def test_schemas_within_tags_and_grammars_are_settled_too() -> None:
    schema, text = COMPLETE["a pattern of a listed name"]
    tag = {"structures": [{"begin": "<f>", "schema": schema, "end": ""}], "triggers": ["<f>"]}
    assert not may_begin(matcher_for(structural_tag=tag), f"<f>{text},")
    assert not may_begin(matcher_for(grammar=f"start: %json {json.dumps(schema)}"), f"{text},")


def test_a_pattern_of_listed_names_becomes_these_properties() -> None:
    schema = {**A, "required": ["b"], "patternProperties": {"^[ab]$": INTEGER, "c": INTEGER}}
    settled = without_empty_patterns(schema, ESCAPES)
    assert settled["properties"] == {"a": {"allOf": [BOOLEAN, INTEGER]}, "b": INTEGER}
    assert settled["patternProperties"] == {"c": INTEGER}


@pytest.mark.parametrize("pattern", ["a", "^a", "a$", "^[ab]$", "^a*$", "^a?$", "(^a$)|b", '^a"?$', "^\\\\$"])
def test_a_pattern_of_more_than_listed_names_stays(pattern: str) -> None:
    schema = {**A, "patternProperties": {pattern: INTEGER}}
    assert without_empty_patterns(schema, ESCAPES) == schema


@pytest.mark.parametrize("pattern", ["a^b$", "^a$b$"])
@pytest.mark.parametrize("place", ["patternProperties", "pattern"])
def test_a_pattern_that_is_not_enforced_is_refused_and_not_dropped(pattern: str, place: str) -> None:
    part = {"patternProperties": {pattern: INTEGER}} if place == "patternProperties" else {"pattern": f"\\x01{pattern}"}
    with pytest.raises(InvalidParameter, match="cannot be enforced"):
        schema_matcher({**A, **part})


@pytest.mark.parametrize("name", ["a", "é", 'a"b', "a\\", "\n"])
def test_names_of_any_characters_are_found(name: str) -> None:
    pattern = "^" + "".join(f"\\x{{{ord(char):x}}}" for char in name) + "$"
    schema = {"required": [name], "patternProperties": {pattern: INTEGER}}
    assert without_empty_patterns(schema, ESCAPES) == {"required": [name], "properties": {name: INTEGER}}


def random_schema(rng: random.Random) -> dict[str, Any]:
    types = [["integer"], ["integer", "boolean"], ["boolean", "null"], ["integer", "null"]]
    values: list[Any] = [True, *({"type": kinds} for kinds in types), {"minimum": 5}, False]
    patterns = ["^a$", "^a", "b$", "b", "^(a|b)$", "^ab?$", "^[bc]$", "^[^x]$", "c", ".*", "^aa*$"]
    schema: dict[str, Any] = {"type": "object"}
    listed = rng.sample(["a", "b", "ab", "ba"], rng.randrange(4))
    parts: list[dict[str, Any]] = [
        {"properties": {name: rng.choice(values) for name in listed}},
        {"patternProperties": {pattern: rng.choice(values) for pattern in rng.sample(patterns, rng.randint(1, 2))}},
        {"required": rng.sample(["a", "b", "ab"], rng.randrange(3))},
        rng.choice([{}, {"additionalProperties": rng.choice(values)}]),
    ]
    if rng.random() < 0.5:
        return schema | parts[0] | parts[1] | parts[2] | parts[3]
    return {**schema, "allOf": [parts[0], parts[1] | parts[3]], **parts[2]}


def instances() -> list[dict[str, Any]]:
    values, names = [7, 1, True, None], ["a", "b", "ab", "ba", "c"]
    single = [{name: value} for name in names for value in values]
    return [{}, *single, *({**one, **other} for one, other in itertools.combinations(single, 2))]


@pytest.mark.parametrize("seed", range(2))
def test_what_comes_out_is_valid_for_properties_and_patterns_together(seed: int) -> None:
    rng, generator = random.Random(seed), np.random.default_rng(seed)
    tried = instances()
    num_accepted = num_drawn = num_passed = 0
    while num_accepted < 30:
        schema = random_schema(rng)
        try:
            matcher = schema_matcher(schema, disable_additional_properties=num_accepted % 2 == 0)
        except InvalidParameter:
            continue
        num_accepted += 1
        is_valid = jsonschema.Draft202012Validator(schema).is_valid
        for instance in rng.sample(tried, 20):
            if allows(matcher, json.dumps(instance)):
                num_passed += 1
                assert is_valid(instance), (schema, instance)
        for _ in range(2):
            text = random_output(matcher, generator, max_tokens=60)
            if text is not None:
                num_drawn += 1
                assert is_valid(json.loads(text)), (schema, text)
    assert num_drawn > 30
    assert num_passed > 30
