"""xgrammar enforces less than the default backend: what it does not is refused at its place, or never comes out."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.config import StructuredOutputsConfig
from penstock.config.structured import XGRAMMAR
from penstock.contract import StructuredOutputsParams
from penstock.errors import ConfigError, InvalidParameter
from penstock.structured.constraint_check import check_constraint
from penstock.structured.schema_check import NotEnforced
from structured.test_schemas import ENFORCED, FORMATS
from support.constraints import (
    allowed_tokens,
    allows,
    demo_tokenizer,
    encode,
    matcher_for,
    random_output,
    schema_matcher,
)

# Of the schemas that the default backend enforces.
REFUSED_HERE = {
    "all of": "/allOf",
    "not a property": "/not",
    "not any of": "/not",
    "halves": "/multipleOf",
    "fractional bounds": "/minimum",
    "pattern and length": "/pattern",
    "a reference with siblings": "/properties/x/$ref",
}
# Valid instances that do not pass: those with properties that the schema does not list.
NARROWER_HERE = {
    "required without properties",
    "typed rest",
    "properties without a type",
    "patterns of names",
    "not both properties",
}

# The schema, and what is named.
REFUSED: list[tuple[Any, str, str]] = [
    ({"properties": {"a": {"pattern": "a", "maxLength": 3}}}, "/properties/a/pattern", "together with a length"),
    ({"items": {"format": "hostname"}}, "/items/format", "together with a length"),
    ({"items": {"pattern": r"\D"}}, "/items/pattern", "digit"),
    ({"patternProperties": {"^a": {}, "^b": {}}}, "/patternProperties", "more than one pattern"),
    ({"oneOf": [{"minimum": 3}, {"maximum": 5}]}, "/oneOf", "exclude each other"),
    ({"type": "number", "exclusiveMaximum": 0.5}, "/exclusiveMaximum", "whole number"),
    ({"type": "integer", "multipleOf": 3, "minimum": 1}, "/multipleOf", "without bounds"),
    ({"enum": ["a"], "maxLength": 3}, "/enum", "together with maxLength"),
    ({"$defs": {"a": {"items": {"allOf": [{"items": {}}, {"items": {"type": "null"}}]}}}, "$ref": "#/$defs/a"},
     "/$defs/a/items/allOf", "more than one schema"),
    ({"properties": {"a": {"type": "object", "properties": {"b": False}, "required": ["b"]}}, "required": ["a"],
      "type": "object"}, "", "nothing is valid"),
]  # fmt: skip


@pytest.mark.usefixtures("xgrammar")
@pytest.mark.parametrize("name", ENFORCED)
def test_what_is_not_refused_passes_only_if_it_is_valid_and_nothing_else_comes_out(name: str) -> None:
    schema, instances = ENFORCED[name]
    if name in REFUSED_HERE:
        with pytest.raises(InvalidParameter, match="xgrammar") as refused:
            schema_matcher(schema)
        assert REFUSED_HERE[name] in str(refused.value)
        return
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator, matcher = cls(schema), schema_matcher(schema)
    passing = [allows(matcher, json.dumps(one, ensure_ascii=False)) for one in instances]
    valid = [validator.is_valid(one) for one in instances]
    assert [one for one, is_valid in zip(passing, valid, strict=True) if one and not is_valid] == []
    assert (passing != valid) == (name in NARROWER_HERE)
    generator = np.random.default_rng(0)
    for text in filter(None, (random_output(matcher, generator) for _ in range(4))):
        validator.validate(json.loads(text))


@pytest.mark.usefixtures("xgrammar")
@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_enforced_or_refused(name: str) -> None:
    right, wrong = FORMATS[name]
    if name == "hostname":
        with pytest.raises(NotEnforced):
            schema_matcher({"format": name})
        return
    matcher = schema_matcher({"format": name})
    assert [allows(matcher, json.dumps(value)) for value in wrong] == [False] * len(wrong)
    passing = [value for value in right if allows(matcher, json.dumps(value))]
    # Between bounds numbers have no exponent.
    assert passing == [value for value in right if value != 1e300]
    assert allows(matcher, "null"), "a format says nothing of other types"


@pytest.mark.parametrize(("schema", "pointer", "said"), REFUSED, ids=str)
def test_what_has_no_grammar_is_refused_at_its_place_before_anything_is_compiled(
    schema: Any, pointer: str, said: str
) -> None:
    with pytest.raises(NotEnforced, match=said) as refused:
        check_constraint(StructuredOutputsParams(json=schema), 10**6, XGRAMMAR)
    assert refused.value.pointers[0] == pointer


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"grammar": 'start: "a"'}, "GBNF"), ({"regex": r"\W"}, "regex")],
)
def test_other_constraints_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    params = StructuredOutputsParams(**fields)
    check_constraint(params, 1000)
    with pytest.raises(InvalidParameter, match=said):
        check_constraint(params, 1000, XGRAMMAR)


@pytest.mark.usefixtures("xgrammar")
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_numbers_between_bounds(kind: str) -> None:
    """Every bound with few digits, against Python's own comparisons."""
    rng = random.Random(kind)
    keywords = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
    near = [0, 1, -1, 5, 9, 10, 11, 99, 100, 101, -10, -99, 250, 999, 1000, 31337]
    for _ in range(60):
        bounds = {name: rng.choice(near) for name in rng.sample(keywords, rng.randint(1, 3))}
        schema = {"type": kind, **bounds}
        validator = jsonschema.Draft202012Validator(schema)
        around = sorted({bound + step for bound in bounds.values() for step in (-11, -1, 0, 1, 10, 90)})
        texts = [str(value) for value in around] + ([f"{value}.5" for value in around] if kind == "number" else [])
        valid = [text for text in texts if validator.is_valid(json.loads(text))]
        if valid:
            matcher = schema_matcher(schema)
            assert [text for text in texts if allows(matcher, text)] == valid, schema


@pytest.mark.usefixtures("xgrammar")
@pytest.mark.parametrize("divisor", [1, 2, 7, 25, 100])
def test_multiples(divisor: int) -> None:
    matcher = schema_matcher({"type": "integer", "multipleOf": divisor})
    for value in [*range(-30, 130), 1000, 1001, 12600]:
        assert allows(matcher, str(value)) == (value % divisor == 0), value
    assert not allows(matcher, "014")


@pytest.mark.usefixtures("xgrammar")
@pytest.mark.parametrize(("least", "most"), [(0, 0), (0, 1), (1, 2), (2, 3), (3, None), (1, None)])
def test_properties_are_counted_and_come_in_their_order(least: int, most: int | None) -> None:
    limits = {"maxProperties": most} if most is not None else {}
    properties = {name: {"type": "integer"} for name in "abcd"}
    schema = {"type": "object", "properties": properties, "required": ["b"], "minProperties": min(least, 1), **limits}
    if most == 0:
        with pytest.raises(NotEnforced, match="nothing is valid"):
            schema_matcher(schema)
        return
    matcher = schema_matcher(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for chosen in range(16):
        names = [name for index, name in enumerate("abcd") if chosen >> index & 1]
        instance = dict.fromkeys(names, 5)
        assert allows(matcher, json.dumps(instance)) == validator.is_valid(instance), names
    assert not allows(matcher, '{"b":1,"a":1}')
    assert not allows(matcher, '{"b":1,"b":1}')


@pytest.mark.usefixtures("xgrammar")
def test_special_tokens_are_no_text() -> None:
    matcher = schema_matcher({"type": "string"})
    assert matcher.accept(encode('"a')) == 2
    special = demo_tokenizer().encode("<|user|>", add_special_tokens=False)
    assert not {*special} & {*allowed_tokens(matcher)}


@pytest.mark.usefixtures("xgrammar")
def test_what_cannot_be_compiled_or_begun_is_an_error_that_says_so() -> None:
    for grammar, said in (("root ::= (", "parser error"), ('root ::= a\na ::= a "x"', "nothing that could come next")):
        with pytest.raises(InvalidParameter, match=f"grammar cannot be enforced: .*{said}"):
            matcher_for(grammar=grammar)
    tag = {"structures": [{"begin": "<|user|>", "schema": {}}], "triggers": ["<|user|>"]}
    with pytest.raises(InvalidParameter, match="a special token"):
        matcher_for(structural_tag=tag)


def test_a_missing_package_is_named_with_the_extra_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.config.structured.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"structured_outputs_backend='xgrammar'.*penstock\[xgrammar\]"):
        StructuredOutputsConfig(structured_outputs_backend=XGRAMMAR)
    monkeypatch.setattr("penstock.config.structured.find_spec", lambda _: object())
    assert StructuredOutputsConfig(structured_outputs_backend=XGRAMMAR).structured_outputs_backend == XGRAMMAR


@pytest.mark.usefixtures("xgrammar")
def test_an_engine_follows_it() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 20]}, "b": {"type": "boolean"}}, "required": ["a"]}
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(json=schema), n=3, temperature=1.0, seed=3, max_tokens=60
    )
    with LLM("demo", structured_outputs_backend=XGRAMMAR) as llm:
        (result,) = llm.generate("Who are you?", params)
    assert [output.finish_reason for output in result.outputs] == ["stop"] * 3
    for output in result.outputs:
        jsonschema.validate(json.loads(output.text), schema)
