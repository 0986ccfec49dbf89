"""Schemas that exclude each other: no instance is valid for both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from penstock.structured.schema_constants import as_key, type_of

_MAX_DEPTH = 8
# Sizes and bounds: lower and upper ones, by type.
_SIZES = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
    "number": ("minimum", "maximum"),
}
_TYPES = (*_SIZES, "boolean", "null")


class _Side(NamedTuple):
    """One of two schemas. parts: those that apply to its instances; types: of these. constants: None for any."""

    parts: list[dict[str, Any]]
    types: set[str]
    constants: dict[str, Any] | None


class Exclusion:
    """Comparison of rewritten schemas. rewritten: the definition of a reference, or None if it is not known yet."""

    def __init__(self, rewritten: Callable[[str], Any]) -> None:
        self._rewritten = rewritten

    def excludes(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether two schemas are known to exclude each other."""
        shared, _ = self.types(one, other, depth)
        return not shared

    def types(self, one: Any, other: Any, depth: int = 0) -> tuple[set[str], set[str]]:
        """Types of the instances that may be valid for both schemas, and types of those of the first alone."""
        parts = list(self._parts(one, 0)), list(self._parts(other, 0))
        if any(False in some for some in parts):
            return set(), set(_TYPES)
        sides = _side(parts[0]), _side(parts[1])
        shared = {name for name in sides[0].types & sides[1].types if not self._excludes_type(name, *sides, depth)}
        if depth <= _MAX_DEPTH and any(
            all(self.excludes(branch, against, depth + 1) for branch in part["anyOf"])
            for side, against in ((sides[0], other), (sides[1], one))
            for part in side.parts
            if "anyOf" in part
        ):
            shared = set()
        return shared, sides[0].types - shared

    def _parts(self, schema: Any, depth: int) -> Iterator[Any]:
        yield schema
        if isinstance(schema, dict) and depth <= _MAX_DEPTH:
            for branch in schema.get("allOf", ()):
                yield from self._parts(branch, depth + 1)
            if "$ref" in schema:
                yield from self._parts(self._rewritten(schema["$ref"]), depth + 1)

    def _excludes_type(self, name: str, one: _Side, other: _Side, depth: int) -> bool:
        """Whether no instance of a type is valid for both."""
        for side, against in ((one, other), (other, one)):
            if side.constants is not None:
                of_type = [value for value in side.constants.values() if type_of(value) == name]
                if not any(_may_hold(value, against) for value in of_type):
                    return True
        if name in _SIZES and (_is_apart(one, other, *_SIZES[name]) or _is_apart(other, one, *_SIZES[name])):
            return True
        return name == "object" and self._excludes_objects(one, other, depth)

    def _excludes_objects(self, one: _Side, other: _Side, depth: int) -> bool:
        for side, against in ((one, other), (other, one)):
            for name in {name for part in side.parts for name in part.get("required", ())}:
                if any(_is_closed_to(name, part) for part in against.parts):
                    return True
                mine, its = (
                    [part["properties"][name] for part in both.parts if name in part.get("properties", {})]
                    for both in (side, against)
                )
                if any(item is False for item in (*mine, *its)):
                    return True
                if depth <= _MAX_DEPTH and any(
                    self.excludes(item, another, depth + 1) for item in mine for another in its
                ):
                    return True
        return False


def _side(parts: list[Any]) -> _Side:
    schemas = [part for part in parts if isinstance(part, dict)]
    types = set(_TYPES)
    constants: dict[str, Any] | None = None
    for part in schemas:
        if "type" in part:
            listed = [part["type"]] if isinstance(part["type"], str) else part["type"]
            types &= {"number" if name == "integer" else name for name in listed}
        if "const" in part or "enum" in part:
            found = {as_key(value): value for value in part.get("enum", [part.get("const")])}
            constants = {key: value for key, value in found.items() if constants is None or key in constants}
    if constants is not None:
        types &= set(map(type_of, constants.values()))
    return _Side(schemas, types, constants)


def _may_hold(value: Any, side: _Side) -> bool:
    """Whether a constant may be valid, as far as types, constants, sizes, bounds and required names tell."""
    kind = type_of(value)
    if kind not in side.types or (side.constants is not None and as_key(value) not in side.constants):
        return False
    if kind == "object" and not all(name in value for part in side.parts for name in part.get("required", ())):
        return False
    size = value if kind == "number" else len(value) if kind in _SIZES else 0
    return not any(
        kind in _SIZES and not part.get(_SIZES[kind][0], -math.inf) <= size <= part.get(_SIZES[kind][1], math.inf)
        for part in side.parts
    )


def _is_apart(low: _Side, high: _Side, least: str, most: str) -> bool:
    """Whether all sizes of one side are below those of the other."""
    tops = [part[most] for part in low.parts if most in part]
    bottoms = [part[least] for part in high.parts if least in part]
    if tops and bottoms and min(tops) < max(bottoms):
        return True
    if least != "minimum":
        return False
    # Bounds that touch, of which one is exclusive.
    tops_below = [part["exclusiveMaximum"] for part in low.parts if "exclusiveMaximum" in part]
    bottoms_above = [part["exclusiveMinimum"] for part in high.parts if "exclusiveMinimum" in part]
    highest, lowest = min([*tops, *tops_below], default=math.inf), max([*bottoms, *bottoms_above], default=-math.inf)
    touches_openly = highest in tops_below or lowest in bottoms_above
    return highest < lowest or (highest == lowest and touches_openly)


def _is_closed_to(name: str, schema: dict[str, Any]) -> bool:
    return (
        schema.get("additionalProperties") is False
        and name not in schema.get("properties", {})
        and not schema.get("patternProperties")
    )
