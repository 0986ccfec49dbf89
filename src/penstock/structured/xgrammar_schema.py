"""Schemas that a context-free grammar can be written for, from what the walk through a schema has written.

A schema becomes alternatives of one type each, without allOf and without keywords that stand beside alternatives. What
has no such form is refused, or made narrower where that leaves enough: what comes out is valid, but less may come out.
What a schema may be then: true; {"$ref"}; {"anyOf"}; {"enum"} of one value; or {"type"} with keywords of that type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias

from penstock.structured.patterns import PatternError, translate_search
from penstock.structured.schema_constants import LARGEST_INTEGER
from penstock.structured.schema_walk import Walk, escaped, is_number
from penstock.structured.xgrammar_patterns import as_json_rule

Schema: TypeAlias = dict[str, Any]
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_HEX = "[0-9A-Fa-f]"
_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,1}[0-9A-Za-z])*"
_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]+"
_OF_PATH = f"(?:[0-9A-Za-z._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
# Formats that backends are asked for by name, more narrowly than validators have them.
_FORMATS = {
    "duration": "^P(?:[0-9]+W|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D"
    "|(?:[0-9]+D)?T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})*$",
    "uri": rf"^[A-Za-z][0-9A-Za-z+.-]*://{_LABEL}(?:\.{_LABEL})*(?::[0-9]{{1,4}})?(?:/{_OF_PATH}*)*"
    rf"(?:\?(?:{_OF_PATH}|[/?])*)?(?:#(?:{_OF_PATH}|[/?])*)?$",
    "uuid": f"^{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}$",
}
# Keywords that say nothing without each other, so that they stay together.
_TOGETHER = (("properties", "patternProperties", "additionalProperties"), ("prefixItems", "items"))
_TIGHTER: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}
_LARGEST_DIVISOR = 100
# Of an object with a largest number of properties: that number times how many it lists.
_MOST_COUNTED = 5000


def narrowed(schema: Any, walk: Walk) -> Any:
    """A schema with definitions, as the walk has written it, which refuses what has no such form."""
    return _Narrowing(walk).whole(schema)


class _Limit(NamedTuple):
    """A bound of a number, by its keyword."""

    name: str
    value: float

    @property
    def is_exclusive(self) -> bool:
        return self.name.startswith("exclusive")

    @property
    def can_be_written(self) -> bool:
        return float(self.value).is_integer() and abs(self.value) <= LARGEST_INTEGER


class _Narrowing:
    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._users = {at: schema for _, at, schema in walk.places.values()}

    def whole(self, schema: Schema) -> Any:
        definitions = schema.get("$defs", {})
        rest = {name: value for name, value in schema.items() if name != "$defs"}
        result = self.schema(rest, "")
        if result is False:
            self._walk.refuse("", "nothing is valid for it")
        anything = result if isinstance(result, dict) else {}
        written = {name: self.schema(value, f"/$defs/{name}") for name, value in definitions.items()}
        return {"$defs": written, **anything} if written else anything

    def schema(self, schema: Any, at: str) -> Any:
        """One schema; at: where what it comes from stands, if the walk does not know better."""
        if isinstance(schema, bool) or not schema:
            return schema is not False
        _, at, _ = self._walk.places.get(id(schema), (None, at, None))
        flat = self._merged([schema], at)
        if isinstance(flat, bool):
            return flat
        if "$ref" in flat:
            return flat if len(flat) == 1 else self._refused(at, "$ref", "together with other keywords")
        for name in ("anyOf", "oneOf"):
            if name in flat:
                return self._alternatives(flat, name, at)
        if "enum" in flat:
            return self._constants(flat, at)
        return self._by_type(flat, at)

    def _refused(self, at: str, name: str, why: str) -> bool:
        """Name what the user wrote: a keyword may come from a format, or from not."""
        found = next((one for one in (name, "format", "not") if one in self._users.get(at, ())), None)
        pointer = at if found is None else f"{at}/{escaped(found)}"
        self._walk.refuse(pointer, f"{name} {why}, with structured_outputs_backend='xgrammar'")
        return True

    def _merged(self, schemas: Iterable[Any], at: str) -> Any:
        """One schema without allOf in the place of several that all apply."""
        merged: Schema = {}
        for schema in self._flat(schemas):
            if schema is False:
                return False
            if isinstance(schema, dict):
                for keywords in _TOGETHER:
                    if any(name in merged for name in keywords) and any(name in schema for name in keywords):
                        return self._refused(at, "allOf", f"of more than one schema with {' or '.join(keywords)}")
                for name, value in schema.items():
                    if not self._merge(merged, name, value):
                        return self._refused(at, "allOf", f"of more than one schema with {name}")
        return False if merged.get("type") == [] else merged or True

    def _flat(self, schemas: Iterable[Any]) -> Iterable[Any]:
        for schema in schemas:
            if isinstance(schema, dict):
                yield {
                    ("enum" if name == "const" else name): ([value] if name == "const" else value)
                    for name, value in schema.items()
                    if name != "allOf"
                }
                yield from self._flat(schema.get("allOf", ()))
            else:
                yield schema

    @staticmethod
    def _merge(merged: Schema, name: str, value: Any) -> bool:
        if name not in merged or merged[name] == value:
            merged[name] = value
        elif name in _TIGHTER:
            merged[name] = _TIGHTER[name](merged[name], value)
        elif name == "type":
            merged[name] = _common(_listed(merged[name]), _listed(value))
        elif name == "required":
            merged[name] = list(dict.fromkeys([*merged[name], *value]))
        else:
            return False
        return True

    def _alternatives(self, schema: Schema, name: str, at: str) -> Any:
        rest = {key: value for key, value in schema.items() if key != name}
        is_users = name in self._users.get(at, ())
        places = [f"{at}/{name}/{index}" if is_users else at for index, _ in enumerate(schema[name])]
        branches = [self._merged([rest, branch], place) for branch, place in zip(schema[name], places, strict=True)]
        branches = [branch for branch in branches if branch is not False]
        if name == "oneOf" and not all(_exclude_each_other(*pair) for pair in combinations(branches, 2)):
            return self._refused(at, name, "of branches that are not known to exclude each other")
        written = [self.schema(branch, f"{at}/{name}" if is_users else at) for branch in branches]
        return _any_of([branch for branch in written if branch is not False])

    def _constants(self, schema: Schema, at: str) -> Any:
        others = schema.keys() - {"enum", "type"}
        if others:
            return self._refused(at, "enum", f"together with {', '.join(sorted(others))}")
        types = _listed(schema.get("type", list(_TYPES)))
        values = [value for value in schema["enum"] if any(_is_of_type(value, name) for name in types)]
        return _any_of([_of_constant(value) for value in values])

    def _by_type(self, schema: Schema, at: str) -> Any:
        if not schema:
            return True
        write = {
            "integer": self._integer,
            "number": self._number,
            "string": self._string,
            "array": self._array,
            "object": self._object,
        }
        written = [
            write[name](schema, at) if name in write else {"type": name}
            for name in _listed(schema.get("type", list(_TYPES)))
        ]
        return _any_of([one for one in written if one is not False])

    def _integer(self, schema: Schema, at: str) -> Any:
        low, high = _limits(schema)
        bounds: dict[str, int] = {}
        if low is not None:
            bounds["minimum"] = math.floor(low.value) + 1 if low.is_exclusive else math.ceil(low.value)
        if high is not None:
            bounds["maximum"] = math.ceil(high.value) - 1 if high.is_exclusive else math.floor(high.value)
        if len(bounds) == 2 and bounds["minimum"] > bounds["maximum"]:
            return False
        divisor = schema.get("multipleOf", 1)
        if divisor == 1:
            return {"type": "integer", **bounds}
        if bounds or not float(divisor).is_integer() or divisor > _LARGEST_DIVISOR:
            return self._refused(at, "multipleOf", f"other than up to {_LARGEST_DIVISOR}, whole, and without bounds")
        return {"type": "integer", "multipleOf": int(divisor)}

    def _number(self, schema: Schema, at: str) -> Any:
        if "multipleOf" in schema:
            if float(schema["multipleOf"]).is_integer():
                return self._integer(schema, at)
            return self._refused(at, "multipleOf", "other than a whole number")
        low, high = _limits(schema)
        for limit in (low, high):
            if limit is not None and not limit.can_be_written:
                return self._refused(at, limit.name, "other than a whole number, where fractions may come")
        if low is not None and high is not None:
            is_empty = low.value == high.value and (low.is_exclusive or high.is_exclusive)
            if low.value > high.value or is_empty:
                return False
        return {"type": "number", **{limit.name: limit.value for limit in (low, high) if limit is not None}}

    def _string(self, schema: Schema, at: str) -> Any:
        lengths = {name: schema[name] for name in ("minLength", "maxLength") if name in schema}
        if lengths.get("minLength", 0) > lengths.get("maxLength", math.inf):
            return False
        if lengths and ("pattern" in schema or "format" in schema):
            return self._refused(at, "pattern" if "pattern" in schema else "format", "together with a length")
        if "format" in schema and "pattern" in schema:
            return self._refused(at, "format", "together with pattern")
        if "format" in schema:
            return {"type": "string", "pattern": translate_search(_FORMATS[schema["format"]])}
        if "pattern" in schema:
            self._check_pattern(schema["pattern"], f"{at}/pattern")
            return {"type": "string", "pattern": schema["pattern"]}
        return {"type": "string", **lengths}

    def _check_pattern(self, pattern: str, at: str) -> None:
        try:
            as_json_rule(pattern)
        except PatternError as error:
            self._walk.refuse(at, f"pattern with {error}, with structured_outputs_backend='xgrammar'")

    def _array(self, schema: Schema, at: str) -> Any:
        items = self.schema(schema.get("items", True), f"{at}/items")
        first = [
            self.schema(item, f"{at}/prefixItems/{index}") for index, item in enumerate(schema.get("prefixItems", ()))
        ]
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        if False in first:
            most = min(most, first.index(False))
        if items is False:
            most = min(most, len(first))
        if most <= len(first):
            first, items = first[: int(most)], False
        if least > most:
            return False
        return {"type": "array", "prefixItems": first, "items": items, "minItems": least, "maxItems": most}

    def _object(self, schema: Schema, at: str) -> Any:
        rest = self.schema(schema.get("additionalProperties", True), f"{at}/additionalProperties")
        required = schema.get("required", [])
        counts: dict[str, int] = {name: schema[name] for name in ("minProperties", "maxProperties") if name in schema}
        if counts.get("maxProperties", math.inf) < max(len(required), counts.get("minProperties", 0)):
            return False
        if "patternProperties" in schema:
            return self._object_of_patterns(schema, required, counts, at)
        if "properties" not in schema and not required:
            if rest is False:
                return False if _least(counts) else {"type": "object", "properties": {}, "required": []}
            return {"type": "object", "additionalProperties": rest, **counts}
        listed = {
            name: self.schema(item, f"{at}/properties/{escaped(name)}")
            for name, item in schema.get("properties", {}).items()
        }
        # Other names may be written with escapes, as a second spelling of these, so there are no others.
        listed |= {name: rest for name in required if name not in listed}
        if any(listed[name] is False for name in required):
            return False
        possible = {name: item for name, item in listed.items() if item is not False}
        if len(possible) < _least(counts):
            return False
        if counts.get("maxProperties", math.inf) >= len(possible):
            counts.pop("maxProperties", None)
        elif len(possible) * counts["maxProperties"] > _MOST_COUNTED:
            return self._refused(at, "maxProperties", f"of {len(possible)} properties that are listed")
        return {"type": "object", "properties": possible, **counts, "required": required}

    def _object_of_patterns(self, schema: Schema, required: list[str], counts: dict[str, int], at: str) -> Any:
        patterns = schema["patternProperties"]
        if len(patterns) > 1 or "properties" in schema or required:
            return self._refused(
                at, "patternProperties", "of more than one pattern, or together with properties or required"
            )
        ((pattern, item),) = patterns.items()
        inner = self.schema(item, f"{at}/patternProperties/{escaped(pattern)}")
        if inner is False:
            return False if _least(counts) else {"type": "object", "properties": {}, "required": []}
        self._check_pattern(pattern, f"{at}/patternProperties/{escaped(pattern)}")
        return {"type": "object", "patternProperties": {pattern: inner}, **counts}


def _limits(schema: Schema) -> tuple[_Limit | None, _Limit | None]:
    """The tighter of the lower bounds, and of the upper ones."""
    low = [_Limit(name, schema[name]) for name in ("exclusiveMinimum", "minimum") if name in schema]
    high = [_Limit(name, schema[name]) for name in ("exclusiveMaximum", "maximum") if name in schema]
    # Of two that are equal the first is taken, which excludes more.
    return max(low, key=_value, default=None), min(high, key=_value, default=None)


def _value(limit: _Limit) -> float:
    return limit.value


def _least(counts: dict[str, int]) -> int:
    return counts.get("minProperties", 0)


def _listed(types: str | list[str]) -> list[str]:
    return [types] if isinstance(types, str) else types


def _any_of(branches: list[Any]) -> Any:
    if True in branches:
        return True
    if len(branches) < 2:
        return branches[0] if branches else False
    return {"anyOf": branches}


def _of_constant(value: Any) -> Schema:
    """A schema that a value alone is valid for; with whitespace where JSON may have it."""
    if isinstance(value, list):
        items = [_of_constant(item) for item in value]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(value), "maxItems": len(value)}
    if isinstance(value, dict):
        properties = {name: _of_constant(item) for name, item in value.items()}
        return {"type": "object", "properties": properties, "required": list(value)}
    return {"enum": [value]}


def _common(one: list[str], other: list[str]) -> list[str]:
    """The types that both let through; an integer is a number."""
    both = [name for name in one if name in other]
    either = {*one, *other}
    if "integer" in either and "number" in either and "number" not in both and "integer" not in both:
        both.append("integer")
    return both


def _is_of_type(value: Any, name: str) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, (int, float)):
        return name == "number" or (name == "integer" and float(value).is_integer())
    return isinstance(value, {"string": str, "array": list, "object": dict}.get(name, ()))


def _exclude_each_other(one: Any, other: Any) -> bool:
    """Whether no instance is known to be valid for both: by types, constants, or a property that both require."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    if "type" in one and "type" in other and not _common(_listed(one["type"]), _listed(other["type"])):
        return True
    if _have_different_constants(one, other):
        return True
    if one.get("type") != "object" or other.get("type") != "object":
        return False
    names = set(one.get("required", ())) & set(other.get("required", ()))
    schemas = (one.get("properties", {}), other.get("properties", {}))
    return any(_have_different_constants(schemas[0].get(name), schemas[1].get(name)) for name in names)


def _have_different_constants(one: Any, other: Any) -> bool:
    values = [_constants(schema) for schema in (one, other)]
    return None not in values and not set(values[0] or ()) & set(values[1] or ())


def _constants(schema: Any) -> list[tuple[bool, Any]] | None:
    """The texts, numbers and so on that are valid; None where that is not known."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is None or any(not (value is None or isinstance(value, str) or is_number(value)) for value in values):
        return None
    return [(is_number(value), value) for value in values]
