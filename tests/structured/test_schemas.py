"""A schema is enforced as `jsonschema` understands it, or refused by name.

Instances are compared token by token with the matcher; and what the matcher lets through, drawn at random, validates.
"""

from __future__ import annotations

import difflib
import json
import zlib
from typing import Any

import jsonschema
import numpy as np
import pytest

from penstock.errors import InvalidParameter
from penstock.structured.schema_check import NotEnforced, enforceable
from support.constraints import allows, compiled_beside, random_output, schema_matcher

OLD, OLDER, NEW = (
    {"$schema": f"http{s}://json-schema.org/{draft}/schema{end}"}
    for s, draft, end in (("", "draft-07", "#"), ("", "draft-04", "#"), ("s", "draft/2020-12", ""))
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}
TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["v"]}

# By name: a schema that is enforced, and instances whose properties are in the schema's order.
ENFORCED: dict[str, tuple[Any, list[Any]]] = {
    "everything": (True, [1, "a", None, [], {"a": [{}]}]),
    "types": ({"type": ["integer", "null"]}, [1, None, "1", 1.5, True, [], {}]),
    "number or integer": ({"type": ["integer", "number"]}, [1, 1.5, "1"]),
    "object": (
        PERSON,
        [{"name": "a"}, {"name": ""}, {"name": "a", "age": 3}, {"name": "a", "age": -1}, {"age": 1}, {}, 5],
    ),
    "closed object": ({**PERSON, "additionalProperties": False}, [{"name": "a"}, {"name": "a", "b": 1}]),
    "typed rest": (
        {**PERSON, "additionalProperties": {"type": "null"}},
        [{"name": "a", "b": None}, {"name": "a", "b": 1}],
    ),
    "properties without a type": ({"properties": {"a": {"type": "null"}}}, [5, {"a": None}, {"a": 1}, {"b": 1}]),
    "required without properties": ({"type": "object", "required": ["a"]}, [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}]),
    "patterns of names": (
        {
            "type": "object",
            "patternProperties": {"^x": {"type": "integer"}},
            "additionalProperties": {"type": "string"},
        },
        [{"xa": 1}, {"xa": "a"}, {"a": "a"}, {"a": 1}, {"xa": 1, "b": "c"}],
    ),
    "names by pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{2}$"}, "additionalProperties": {"type": "integer"}},
        [{"ab": 1}, {"a": 1}, {"ab": "x"}, {}, {"ab": 1, "cd": 2}],
    ),
    "names by a reference to a list, as Pydantic writes them": (
        {
            "$defs": {"Color": {"enum": ["red", "blue"], "title": "Color", "type": "string"}},
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/Color"},
            "additionalProperties": {"type": "integer"},
        },
        [{"red": 1}, {"green": 1}, {"red": 1, "blue": 2}, {"red": "1"}, {}],
    ),
    "names by a constant": ({"type": "object", "propertyNames": {"const": "a"}}, [{"a": 1}, {"b": 1}, {}]),
    "names by lengths": (
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
        [{"ab": 1}, {"a": 1}, {"abcd": 1}, {"€€€": 1}],
    ),
    "names of a format": (
        {"type": "object", "propertyNames": {"type": "string", "format": "uuid"}},
        [{"123e4567-e89b-12d3-a456-426614174000": 1}, 1],
    ),
    "no names": ({"type": "object", "propertyNames": False}, [{}, {"a": 1}]),
    "a length that no output has": ({"type": "string", "maxLength": 2**50}, ["a", 1]),
    "names with U+007F": ({"properties": {"a\x7f": {"type": "null"}}}, [{"a\x7f": None}, {"a\x7f": 1}]),
    "names by list": ({"propertyNames": {"enum": ["a", "b"]}}, [{"a": 1}, {"c": 1}, {"a": 1, "b": 2}, 5]),
    "at least one property": ({"type": "object", "minProperties": 1}, [{}, {"a": 1}, {"a": 1, "b": 1}]),
    "as many properties as are required": (
        {"type": "object", "required": ["a", "b"], "minProperties": 2},
        [{"a": 1}, {"a": 1, "b": 2}],
    ),
    "at most two properties": (
        {"type": "object", "maxProperties": 2},
        [{}, {"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}],
    ),
    "what a required property needs": (
        {"type": "object", "required": ["a"], "dependentRequired": {"a": ["b"]}},
        [{"a": 1}, {"a": 1, "b": 2}, {"b": 1}],
    ),
    "unevaluated properties without applicators": (
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        [{"a": 1}, {"b": 1}],
    ),
    "array": ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2], [1, "a"], {}]),
    "sizes": ({"type": "array", "minItems": 1, "maxItems": 2}, [[], [1], [1, 2], [1, 2, 3]]),
    "tuple": (
        {"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        [[], [1], [1, "a"], [1, "a", 2], ["a"], 5],
    ),
    "old tuple": (
        {**OLD, "items": [{"type": "integer"}], "additionalItems": {"type": "string"}},
        [[], [1], [1, "a"], [1, 2], ["a"]],
    ),
    "additional items of no tuple": ({**OLD, "items": {"type": "integer"}, "additionalItems": False}, [[1], [1, 2]]),
    "unevaluated items without applicators": ({"prefixItems": [True], "unevaluatedItems": False}, [[1], [1, 2]]),
    "one item is different from all others": ({"type": "array", "maxItems": 1, "uniqueItems": True}, [[], [1], [1, 1]]),
    "lengths": (
        {"type": "string", "minLength": 2, "maxLength": 3},
        ["a", "ab", "abc", "abcd", "éé", "日本語だ"],
    ),
    "pattern and length": ({"type": "string", "pattern": "^a*$", "maxLength": 2}, ["", "aa", "aaa", "b"]),
    "pattern inside": ({"type": "string", "pattern": "b.d"}, ["abcde", "bd", "bxd", "b\nd"]),
    "text with escapes": ({"type": "string"}, ['a"b', "a\\b", "a\nb\t", "/", "é"]),
    "bounds": ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, [-4, -3, 0, 11, 12, 100]),
    "fractional bounds": ({"type": "number", "minimum": 0.5, "maximum": 1.25}, [0.4, 0.5, 1, 1.25, 1.26, 2]),
    "bounds that are only about numbers": ({"minimum": 3}, ["a", 2, 3, None]),
    "old exclusive bounds": (
        {**OLDER, "type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 5, "exclusiveMaximum": False},
        [0, 1, 5, 6],
    ),
    "multiples": ({"type": "integer", "multipleOf": 5}, [0, 5, 12, -15, 1]),
    "halves": ({"type": "number", "multipleOf": 0.5}, [0.5, 1, 1.25, 2.5]),
    "enum": ({"enum": ["a", 1, None, True, {"a": [1]}, ""]}, ["a", 1, None, True, {"a": [1]}, "", "b", 2, False, {}]),
    "enum of a type": ({"type": "string", "enum": ["a", 1]}, ["a", 1]),
    "const": ({"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}, {"a": [1]}, {}]),
    "any of": ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [1, "a", "ab", None]),
    "all of": (
        {"allOf": [{"properties": {"a": {"minimum": 1}}}, {"properties": {"a": {"maximum": 2}}, "required": ["a"]}]},
        [{"a": 1}, {"a": 0}, {"a": 3}, {}],
    ),
    "one of that exclude each other": (
        {
            "oneOf": [
                {"properties": {"k": {"const": "a"}, "v": {"type": "integer"}}, "required": ["k"]},
                {"properties": {"k": {"const": "b"}, "v": {"type": "string"}}, "required": ["k"]},
            ],
            "type": "object",
        },
        [{"k": "a", "v": 1}, {"k": "a", "v": "x"}, {"k": "b", "v": "x"}, {"k": "c"}, {}],
    ),
    "one of references": (
        {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "$defs": {
                "cat": {"type": "object", "properties": {"k": {"const": "cat"}}, "required": ["k"]},
                "dog": {"type": "object", "properties": {"k": {"const": "dog"}}, "required": ["k"]},
            },
        },
        [{"k": "cat"}, {"k": "dog"}, {"k": "cow"}, {}],
    ),
    "one of that overlap": ({"oneOf": [{"minimum": 3}, {"maximum": 5}]}, [2, 3, 4, 5, 6, "a"]),
    "one of required names": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
    ),
    "one of references that overlap": (
        {
            "$defs": {"s": {"enum": ["a", "b"]}, "t": {"enum": ["b", "c"]}},
            "oneOf": [{"$ref": "#/$defs/s"}, {"$ref": "#/$defs/t"}],
        },
        ["a", "b", "c", "d", 1],
    ),
    "one of beside any of": (
        {"anyOf": [{"minimum": 1}, {"type": "null"}], "oneOf": [{"minimum": 3}, {"type": "null"}]},
        [None, 1, 3],
    ),
    "if then else": (
        {
            "type": "object",
            "properties": {"c": {"enum": ["us", "uk", "fr"]}, "zip": {"type": "string"}},
            "if": {"properties": {"c": {"const": "us"}}, "required": ["c"]},
            "then": {"properties": {"zip": {"pattern": "^[0-9]{2}$"}}},
            "else": {"properties": {"zip": {"pattern": "^[a-z]{2}$"}}},
        },
        [
            *({"c": country, "zip": code} for country in ("us", "uk") for code in ("12", "ab")),
            *({"zip": "ab"}, {"zip": "12"}, {"c": "us"}, {}, {"c": "de"}),
        ],
    ),
    "if then, twice": (
        {
            "allOf": [
                {"if": {"properties": {"k": {"const": k}}, "required": ["k"]}, "then": {"required": [k]}} for k in "ab"
            ],
            "properties": {"k": {"type": "string"}, "a": {}, "b": {}},
        },
        [{"k": "a"}, {"k": "a", "a": 1}, {"k": "b", "a": 1}, {"k": "b", "b": 1}, {"k": "ab"}, {"k": ""}, {}, 5],
    ),
    "if without then": ({"if": {"type": "null"}}, [None, 1]),
    "if of a bound": ({"if": {"minimum": 5}, "then": {"multipleOf": 2}}, [3, 5, 6, "a"]),
    "dependent names": (
        {"properties": {"a": {}, "b": {}, "c": {}}, "dependentRequired": {"a": ["b", "c"], "c": ["b"]}},
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1, "c": 1}, {"c": 1}, {"b": 1, "c": 1}, {"a": 1, "c": 1}, 5],
    ),
    "dependent schemas": (
        {"properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
        [{"a": 1, "b": 1}, {"a": 1, "b": None}, {"b": 1}, {"a": 1}, {}, 5],
    ),
    "old dependencies": (
        {**OLD, "properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"], "b": {"maxProperties": 2}}},
        [{}, {"a": 1}, {"a": 1, "b": 1}, {"b": 1}, {"a": 1, "b": 1, "c": 1}],
    ),
    "contains": ({"type": "array", "contains": {"type": "null"}}, [[], [None], [None, 1], [1]]),
    "contains behind a prefix": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "contains": {"type": "null"}, "minContains": 2},
        [[1, None, None], [1, None], [1, None, None, "a"], [None, None]],
    ),
    "contains up to": (
        {"type": "array", "contains": {"type": "integer"}, "minContains": 0, "maxContains": 0},
        [[], [1], ["a"], ["a", 1]],
    ),
    "contains between": (
        {"type": "array", "contains": {"type": "integer"}, "maxContains": 2},
        [[], [1], [1, 1], [1, "a"], [1, "a", "a"], [1, 1, 1], ["a"]],
    ),
    "unique constants": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1},
        [[], ["a"], ["b", "a"], ["a", "a"], ["c", "b", "a"], ["a", "b", "a"], ["d"]],
    ),
    "hundredths": ({"type": "number", "multipleOf": 0.01}, [0.25, 12, -3.5, 0.255, "a"]),
    "at least two of three properties": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "required": ["c"]},
        [{"c": 1}, {"a": 1, "c": 1}, {"a": 1, "b": 1}, {"b": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}],
    ),
    "not some texts": (
        {"type": "string", "not": {"enum": ["ab", "abc", "b", ""]}},
        ["", "a", "ab", "abc", "abcd", "b", "é"],
    ),
    "not some constants": (
        {"not": {"enum": ["a", 1, 3, None, True]}},
        ["a", "b", 1, 2, 3, 3.5, None, True, False],
    ),
    "not these items": ({"type": "array", "not": {"items": {"type": "null"}}}, [[1], [None], [], [1, None]]),
    "a reference with siblings in an old draft": (
        {**OLD, "definitions": {"a": {"type": "integer"}}, "items": {"$ref": "#/definitions/a", "minimum": 3}},
        [[3], ["a"]],
    ),
    "one of types": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a", None]),
    "unknown formats": ({"type": "string", "format": "country-code"}, ["a", 1]),
    "misspelt keywords": ({"items": {"maxlength": 1}, "anyof": [], "nullable": True}, [["ab"], 1]),
    "not a type": ({"not": {"type": ["string", "object"]}}, ["a", {}, 1, None, [1]]),
    "not a property": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a"]}},
        [{"a": 1}, {"b": 1}, {}],
    ),
    "not both properties": (
        {"type": "object", "not": {"required": ["a", "b"]}},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
    ),
    "not any of": (
        {"type": "object", "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
        [{}, {"a": 1}, {"b": 1}, {"c": 1}],
    ),
    "not a number's bound": ({"not": {"minimum": 5}}, [4, 5, "a"]),
    "not a length": ({"type": "string", "not": {"maxLength": 2}}, ["ab", "abc"]),
    "not a constant": ({"type": "integer", "not": {"const": 3}}, [2, 3, 4]),
    "not not": ({"not": {"not": {"type": "string", "pattern": "a"}}}, ["a", "b", 1]),
    "not true": ({"type": "boolean", "not": {"const": True}}, [True, False]),
    "recursion": (TREE, [{"v": 1}, {"v": 1, "next": {"v": 2}}, {"v": 1, "next": {"v": "x"}}, {"v": 1, "next": {}}]),
    "recursion through a choice": (
        {
            "$defs": {"l": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/l"}}]}},
            "$ref": "#/$defs/l",
        },
        [None, [], [None, [None]], 1, [1]],
    ),
    "a reference with siblings": (
        {**NEW, "$defs": {"a": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/a", "minimum": 3}}},
        [{"x": 3}, {"x": 2}, {"x": "a"}],
    ),
    "an anchor": (
        {"$defs": {"a": {"$anchor": "it", "type": "null"}}, "type": "array", "items": {"$ref": "#it"}},
        [[None], [1]],
    ),
    "names that a pointer escapes": (
        {"definitions": {"a/b~c": {"type": "null"}}, "type": "array", "items": {"$ref": "#/definitions/a~1b~0c"}},
        [[None], [1]],
    ),
    "its own address": ({"$id": "http://here/a", "type": "array", "items": {"$ref": "http://here/a"}}, [[], [[]], [1]]),
    "annotations": (
        {
            "title": "t",
            "default": 5,
            "x-minimum": 3,
            "examples": [1],
            "deprecated": True,
            "order": 3,
            "type": "integer",
        },
        [1, "a"],
    ),
    "a property that is named like a keyword": (
        {"type": "object", "properties": {"if": {"type": "null"}, "maxlength": {"type": "null"}}},
        [{"if": None}, {"maxlength": 1}],
    ),
    "then without if": ({"then": {"type": "string"}}, [1, "a"]),
}

FORMATS = {
    "date": (["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01", "x"]),
    "time": (["12:34:56Z", "12:34:56.7+01:30", "23:59:60Z"], ["24:00:00Z", "12:34:60Z", "12:34:56", "12:34Z"]),
    "date-time": (["2024-02-29T12:34:56Z"], ["2023-02-29T12:34:56Z", "2024-02-29 12:34:56Z", "2024-02-29"]),
    "hostname": (
        ["a", "a-b.example", "a" * 63, "1.2"],
        ["-a", "a-", "a" * 64, "xn--x", "a..b", "", "a." * 126 + "ab"],
    ),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08", "2eb8aa08-aa98-11ea-b4aa-73b441d1638g"]),
    "ipv4": (["127.0.0.1", "255.10.0.9"], ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "1::7:8", "::ffff:1.2.3.4", "1:2:3:4:5:6:1.2.3.4"],
        [
            "1",
            ":",
            "1:2:3:4:5:6:7",
            "1:2:3:4:5:6:7:8:9",
            "1::2::3",
            "12345::",
            "1:2:3:4:5:6:7:1.2.3.4",
            "::1.2.3",
            ":1",
        ],
    ),
    "email": (["joe@example.com"], ["joe", "joe@"]),
    "int32": ([0, 2**31 - 1, -(2**31)], [2**31, -(2**31) - 1]),
    "int64": ([0, 2**53, -(2**53)], [2**53 + 2]),
    "float": ([0.5, -(2**53)], [2**53 + 2, 1e300]),
    "double": ([0.5, 2**53], [2**53 + 2, 1e300]),
    "byte": (["", "QQ==", "QUI=", "QUJD", "a+/9QUJD"], ["Q", "QR==", "QUJ=", "QUJDQ", "QQ==QQ==", "Q Q="]),
    "json-pointer": (["", "/", "/a~0b/~1/ c"], ["a", "/~", "/~2"]),
    "relative-json-pointer": (["0", "10#", "1/a~1b"], ["", "01", "-1", "0##", "/a", "1a"]),
}


def _optional(count: int, prefix: str = "property") -> dict[str, Any]:
    """Object of optional properties."""
    names = {f"{prefix}_{number}": {"type": "integer"} for number in range(count)}
    return {"type": "object", "properties": names, "additionalProperties": False}


# What is refused: the schema, the pointer that is named, and a part of what is said of it.
REFUSED: list[tuple[Any, str, str]] = [
    ({"type": "array", "uniqueItems": True}, "/uniqueItems", "compare"),
    ({"uniqueItems": True, "items": {"enum": list(range(10))}}, "/uniqueItems", "10 constants"),
    ({"contains": {"type": "null"}, "minContains": 17}, "/contains", "at most 16 items"),
    ({"contains": {"pattern": "a"}, "maxContains": 2}, "/contains", "maxContains"),
    ({"contains": {}, "minContains": -1}, "/minContains", "non-negative"),
    ({"properties": {"a": {"if": {"pattern": "a"}, "then": {"maxLength": 2}}}}, "/properties/a/if", "its opposite"),
    (
        {"dependentRequired": {name: [f"{name}{name}"] for name in "abcdefg"}},
        "/dependentRequired/g",
        "more than 64 cases",
    ),
    ({"allOf": [{"if": {"minimum": n}, "then": False} for n in range(7)]}, "/allOf/6/if", "more than 64 cases"),
    ({"dependentRequired": {"a": {}}}, "/dependentRequired/a", "not an array of names"),
    ({"dependentSchemas": {"a": ["b"]}}, "/dependentSchemas/a", "not a schema"),
    ({"dependencies": {"a": "^1.0"}}, "/dependencies/a", "an array of names or a schema"),
    ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "/oneOf", "exclude each other"),
    ({"not": {"pattern": "a"}}, "/not", "the rest"),
    ({"not": {"type": "strin"}}, "/not/type", "not a type"),
    ({"not": {"not": {"$ref": "#"}, "type": "null"}}, "/not/not/$ref", "without going any deeper"),
    ({"not": {"format": "int32"}}, "/not", "the rest"),
    ({"type": "object", "minProperties": 2}, "/minProperties", "a few listed properties"),
    ({"format": 5}, "/format", "not the name"),
    ({"pattern": "a(?=b)"}, "/pattern", "lookahead"),
    ({"patternProperties": {"a/(?!b)": {}}}, "/patternProperties/a~1(?!b)", "lookahead"),
    (
        {"properties": {"a": {"patternProperties": {f"^{n}$": {} for n in range(201)}}}},
        "/properties/a/patternProperties",
        "more than 200 patterns of names",
    ),
    ({"multipleOf": 1e-11}, "/multipleOf", "fractions such as"),
    ({"multipleOf": 0}, "/multipleOf", "above 0"),
    ({"minimum": 2**60}, "/minimum", "not exact"),
    ({"const": [2**60]}, "/const", "not exact"),
    ({"const": {"\x01": 1}}, "/const", "control characters"),
    ({"const": "\x7f", "properties": {"a\n": {}}}, "", "written twice"),
    ({"properties": {"\x01": {}}}, "/properties/\x01", "control characters"),
    ({"unevaluatedProperties": False, "anyOf": [{}]}, "/unevaluatedProperties", "anyOf"),
    ({"propertyNames": {"pattern": "a"}, "unevaluatedProperties": False}, "/unevaluatedProperties", "propertyNames"),
    ({"propertyNames": {"format": "email"}}, "/propertyNames", "a pattern, lengths"),
    ({"propertyNames": {"minLength": 2, "pattern": "a"}}, "/propertyNames", "a pattern, lengths"),
    ({"items": _optional(2001)}, "", "more than 2,000 optional properties"),
    ({"anyOf": [_optional(1000, "a"), _optional(1001, "b")]}, "", "more than 2,000 optional properties"),
    ({"properties": {f"p{n}": {} for n in range(5001)}}, "/properties", "more than 5,000 properties"),
    ({"required": [f"p{n}" for n in range(5001)]}, "/required", "more than 5,000 required"),
    ({"minLength": 2**40}, "/minLength", "at most 2,147,483,648"),
    ({"pattern": "a{99999999999}"}, "/pattern", "repeats more than"),
    ({"$ref": "other.json"}, "/$ref", "another document"),
    ({"$ref": "#/nowhere"}, "/$ref", "leads nowhere"),
    ({"$ref": "#nowhere"}, "/$ref", "leads nowhere"),
    ({"$ref": "#"}, "/$ref", "without going any deeper"),
    ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "/$ref", "without going any deeper"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "", "nothing finite"),
    ({"type": "array", "minItems": 1, "items": {"anyOf": [{"$ref": "#"}, False]}}, "", "nothing finite"),
    (
        {
            "$defs": {"a": {"type": "array", "prefixItems": [{"$ref": "#/$defs/a"}], "minItems": 1}},
            "items": {"$ref": "#/$defs/a"},
        },
        "/$defs/a",
        "nothing finite",
    ),
    ({"$dynamicRef": "#a"}, "/$dynamicRef", "$ref"),
    ({"$schema": "http://example.org/mine"}, "/$schema", "not known"),
    ({**NEW, "items": [{}]}, "/items", "prefixItems"),
    ({**NEW, "minimum": 1, "exclusiveMinimum": True}, "/exclusiveMinimum", "draft 4"),
    ({"exclusiveMinimum": True}, "/exclusiveMinimum", "without minimum"),
    ({"type": "strin"}, "/type", "not a type"),
    ({"type": []}, "/type", "not a type"),
    ({"enum": []}, "/enum", "non-empty array"),
    ({"anyOf": []}, "/anyOf", "non-empty array"),
    ({"required": True}, "/required", "array of strings"),
    ({"properties": []}, "/properties", "object of schemas"),
    ({"items": {"properties": {"a": 5}}}, "/items/properties/a", "a schema is"),
    ({"minLength": -1}, "/minLength", "non-negative integer"),
    ({"minLength": "1"}, "/minLength", "non-negative integer"),
    (False, "", "nothing is valid"),
]


@pytest.mark.parametrize("name", ENFORCED)
def test_an_instance_passes_if_and_only_if_it_is_valid(name: str) -> None:
    schema, instances = ENFORCED[name]
    validator = _validator(schema)
    matcher = schema_matcher(schema, disable_additional_properties=False)
    found = {json.dumps(one, ensure_ascii=False): validator.is_valid(one) for one in instances}
    assert {text: allows(matcher, text) for text in found} == found


@pytest.mark.parametrize("name", ENFORCED)
def test_what_is_let_through_at_random_is_valid(name: str) -> None:
    schema, _ = ENFORCED[name]
    validator, matcher = _validator(schema), schema_matcher(schema)
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    outputs = [random_output(matcher, generator) for _ in range(4)]
    for text in filter(None, outputs):
        validator.validate(json.loads(text))


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_enforced(name: str) -> None:
    right, wrong = FORMATS[name]
    matcher = schema_matcher({"format": name})
    assert [allows(matcher, json.dumps(value)) for value in [*right, *wrong]] == [True] * len(right) + [False] * len(
        wrong
    )
    assert allows(matcher, "null"), "a format says nothing of other types"


@pytest.mark.parametrize(("schema", "pointer", "said"), REFUSED, ids=str)
def test_what_cannot_be_enforced_is_refused_at_its_place(schema: Any, pointer: str, said: str) -> None:
    with pytest.raises(NotEnforced) as refused:
        enforceable(schema)
    assert refused.value.pointers[0] == pointer
    assert f"{pointer or '/'}: " in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "patternProperties": {"a": {"type": "null"}, "b": {"type": "integer"}}},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
    ],
    ids=str,
)
def test_what_only_compiling_tells_is_refused_then(schema: Any) -> None:
    enforceable(schema)
    with pytest.raises(InvalidParameter, match=r"structured_outputs.json cannot be enforced: "):
        schema_matcher(schema)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"items": {"maxlength": 3}}, "/items/maxlength: 'maxlength' is not a keyword; did you mean maxLength?"),
        ({"additonalProperties": False}, "did you mean additionalProperties?"),
        ({"format": "ports"}, "/format: the format 'ports' is not enforced"),
        ({"nullable": True}, "/nullable: nullable belongs to OpenAPI"),
        ({"extends": {}}, "/extends: extends belongs to draft 3"),
    ],
    ids=str,
)
def test_annotations_that_may_be_mistakes_are_named_once(
    schema: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"$comment": "unlike those of other tests", "properties": {"only-here": schema}, **schema}
    for _ in range(2):
        enforceable(schema)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert said in warning


def test_a_name_cannot_be_written_a_second_time_in_another_way() -> None:
    """An escape would make another property for the grammar, and the same one for a parser."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    matcher = schema_matcher(schema, disable_additional_properties=False)
    assert allows(matcher, '{"a":1,"b":2}')
    assert not allows(matcher, '{"a":1,"a":"x"}')
    assert not allows(matcher, '{"a":1,"\\u0061":"x"}')


@pytest.mark.parametrize("char", ["\x7f", "\x00", "\x1f"])
def test_constants_with_control_characters_are_written_by_number(char: str) -> None:
    matcher = schema_matcher({"enum": [f"a{char}b", "c"]})
    assert all(allows(matcher, text) for text in (json.dumps(f"a{char}b"), '"c"'))
    assert not any(allows(matcher, text) for text in ('"ab"', f'"a{char}b"'))


def test_more_than_a_thousand_optional_properties_are_followed() -> None:
    matcher = schema_matcher(_optional(1500))
    assert allows(matcher, json.dumps({f"property_{number}": number for number in (0, 1, 1499)}))


def test_checking_a_schema_takes_time_in_proportion_to_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: comparisons of unknown names with keywords, and rebuilt lists of required names."""
    compared: list[str] = []
    close = difflib.get_close_matches
    monkeypatch.setattr(
        difflib, "get_close_matches", lambda word, *rest, **kw: compared.extend(rest[0]) or close(word, *rest, **kw)
    )
    enforceable({f"{number:x}quizzical": 1 for number in range(2000)})
    assert len(compared) < 2000
    names = [f"p{number}" for number in range(4000)]
    rewritten = enforceable({"required": names, "dependencies": dict.fromkeys(names, names[:2])})
    assert rewritten["required"] == names


def test_closed_objects_have_no_properties_that_no_request_named() -> None:
    schema = {"properties": {"a": {"type": "object", "properties": {"b": {}}}, "c": {"additionalProperties": True}}}
    matcher = schema_matcher(schema, disable_additional_properties=True)
    assert allows(matcher, '{"a":{"b":1},"c":{"d":1}}')
    assert not allows(matcher, '{"e":1}')
    assert not allows(matcher, '{"a":{"e":1}}')


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: Any = {}
    for _ in range(100):
        schema = {"items": schema}
    with pytest.raises(NotEnforced, match="nested more than"):
        enforceable(schema)


def test_definitions_may_lead_to_each_other_for_as_long_as_they_like() -> None:
    definitions = {str(index): {"items": {"$ref": f"#/$defs/{index + 1}"}} for index in range(2000)}
    schema = {"$defs": {**definitions, "2000": {"type": "null"}}, "$ref": "#/$defs/0", "type": "array"}
    # By a thread of its own, which has a deep stack.
    matcher = compiled_beside(json=schema).start()
    assert allows(matcher, "[[[[[1]]]]]")
    assert not allows(matcher, "[[[[[1")


def _validator(schema: Any) -> Any:
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return validator(schema)
