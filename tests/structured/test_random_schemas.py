"""Schemas made at random: what passes is valid, and what is drawn token by token validates."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from penstock.errors import InvalidParameter
from penstock.structured.final_check import exact_json, schema_errors
from support.constraints import allows, random_output, schema_matcher

NAMES = ["a", "b", "c"]
TYPES = ["integer", "number", "string", "null", "boolean", "object", "array", ["string", "integer"], ["object", "null"]]
NUM_SCHEMAS = 120


class Maker:
    """Makes schemas and instances that have a chance to meet."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.keywords: dict[str, Callable[[int], Any]] = {
            "type": lambda _: rng.choice(TYPES),
            "properties": lambda depth: {name: self.schema(depth) for name in rng.sample(NAMES, rng.randint(1, 3))},
            "additionalProperties": lambda depth: rng.choice([False, self.schema(depth)]),
            "patternProperties": lambda depth: {rng.choice(["^a", "b", "c$"]): self.schema(depth)},
            "propertyNames": lambda _: rng.choice([{"pattern": "^a"}, {"enum": ["a", "b"]}, True]),
            "unevaluatedProperties": lambda depth: rng.choice([False, self.schema(depth)]),
            "required": lambda _: rng.sample(NAMES, rng.randint(1, 2)),
            "dependentRequired": lambda _: {rng.choice(NAMES): ["b"]},
            "minProperties": lambda _: rng.randrange(4),
            "dependentSchemas": lambda depth: {rng.choice(NAMES): self.schema(depth)},
            "dependencies": lambda depth: {rng.choice(NAMES): rng.choice([["c"], self.schema(depth)])},
            "if": self.schema,
            "then": self.schema,
            "else": self.schema,
            "contains": self.schema,
            "minContains": lambda _: rng.randrange(3),
            "maxContains": lambda _: rng.randrange(3),
            "uniqueItems": lambda _: rng.random() < 0.8,
            "format": lambda _: rng.choice(["date", "ipv4", "anything"]),
            "maxProperties": lambda _: rng.randrange(4),
            "items": self.schema,
            "prefixItems": lambda depth: [self.schema(depth) for _ in range(rng.randint(1, 2))],
            "unevaluatedItems": lambda depth: rng.choice([False, self.schema(depth)]),
            "minItems": lambda _: rng.randrange(3),
            "maxItems": lambda _: rng.randrange(4),
            "minLength": lambda _: rng.randrange(3),
            "maxLength": lambda _: rng.randrange(4),
            "pattern": lambda _: rng.choice(["^a", "b$", "^a*$", "^[ab]{1,2}$", "a|b", "^(ab)+$"]),
            "minimum": lambda _: rng.choice([0, 1, -3, 0.5, 2.5]),
            "maximum": lambda _: rng.choice([5, 2, 0, 7.25]),
            "exclusiveMinimum": lambda _: rng.choice([0, 1, -3, 0.5]),
            "exclusiveMaximum": lambda _: rng.choice([5, 2, 7.25]),
            "multipleOf": lambda _: rng.choice([1, 2, 3, 0.5, 0.25, 0.01]),
            "enum": lambda _: [self.instance() for _ in range(rng.randint(1, 3))],
            "const": lambda _: self.instance(),
            "anyOf": self._branches,
            "allOf": self._branches,
            "oneOf": self._branches,
            "not": self.schema,
            "$ref": lambda _: rng.choice(["#/$defs/x", "#/$defs/y", "#"]),
        }

    def _branches(self, depth: int) -> list[Any]:
        return [self.schema(depth) for _ in range(self.rng.randint(1, 3))]

    def schema(self, depth: int = 0) -> Any:
        if depth > 3 or self.rng.random() < 0.06:
            return self.rng.choice([True, False, {"type": "integer"}, {"type": "string"}])
        names = self.rng.sample(["type", "type", *self.keywords], self.rng.randint(1, 4))
        return {name: self.keywords[name](depth + 1) for name in names}

    def instance(self, depth: int = 0) -> Any:
        rng = self.rng
        kinds: list[Callable[[], Any]] = [
            lambda: None,
            lambda: rng.random() < 0.5,
            lambda: rng.choice([0, 1, 2, 3, 5, 10, -1, -5]),
            lambda: rng.choice([0.5, 1.5, -2.25, 0.1]),
            lambda: rng.choice(["", "a", "b", "ab", "aa", "abc", "é"]),
            lambda: [self.instance(depth + 1) for _ in range(rng.randrange(4))],
            lambda: {name: self.instance(depth + 1) for name in rng.sample(NAMES, rng.randrange(4))},
        ]
        return rng.choice(kinds if depth < 2 else kinds[:5])()


def _check(validator: Any, schema: Any, text: str) -> None:
    """By jsonschema alone, and by the final check, which knows the keywords of old drafts too."""
    assert validator.is_valid(exact_json(text)), (schema, text)
    assert not schema_errors(json.dumps(schema), text), (schema, text)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_nothing_passes_that_is_not_valid(seed: int) -> None:
    maker, generator = Maker(seed), np.random.default_rng(seed)
    num_accepted = num_passed = num_drawn = 0
    while num_accepted < NUM_SCHEMAS:
        schema = {"$defs": {"x": maker.schema(2), "y": maker.schema(2)}, "allOf": [maker.schema()]}
        try:
            matcher = schema_matcher(schema, disable_additional_properties=num_accepted % 2 == 0)
        except InvalidParameter:
            continue
        num_accepted += 1
        validator = jsonschema.Draft202012Validator(exact_json(json.dumps(schema)))
        for instance in (maker.instance() for _ in range(10)):
            if allows(matcher, json.dumps(instance, ensure_ascii=False)):
                num_passed += 1
                _check(validator, schema, json.dumps(instance))
        text = random_output(matcher, generator, max_tokens=150)
        if text is not None:
            num_drawn += 1
            _check(validator, schema, text)
    assert num_passed > NUM_SCHEMAS
    assert num_drawn > NUM_SCHEMAS // 2
