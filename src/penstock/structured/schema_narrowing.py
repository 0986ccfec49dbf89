"""Closed objects and default bounds, for schemas without additionalProperties or sizes.

JSON Schema leaves objects open and strings, arrays and numbers without bounds, so that an output may never end. Each
place of a narrowed schema allows a subset of the instances that are valid there. Schemas that apply to the same
instance (allOf, anyOf, $ref) see each other's properties and bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from penstock.structured.negation import ANY_TEXT

MAX_LENGTH = 1024
MAX_ITEMS = 256
MAX_PROPERTIES = 256
MAX_NAME_LENGTH = 256
MAX_DIGITS = 15
MAX_FRACTION_DIGITS = 10
# Limit of schemas that apply to one instance; beyond it a schema is not narrowed.
_MAX_PARTS = 1000
_IN_PLACE = ("allOf", "anyOf")
_TYPES = {"array", "number", "object", "string"}
_LARGEST = 10**MAX_DIGITS - 1
_ANY_NAME = f"^(?s:.{{0,{MAX_NAME_LENGTH}}})$"
_ANYTHING = {"$ref": "#/$defs/anything"}
_OPEN = "-open"


class DefaultBounds(NamedTuple):
    """Default bounds of strings, in characters, and of arrays."""

    length: int = MAX_LENGTH
    items: int = MAX_ITEMS

    @classmethod
    def within(cls, context: int) -> DefaultBounds:
        """Bounds of outputs of a context, in tokens: smaller ones where the usual ones would take much of it."""
        return cls(min(MAX_LENGTH, max(1, context // 8)), min(MAX_ITEMS, max(1, context // 32)))


def narrowed(schema: dict[str, Any], bounds: DefaultBounds | None = None) -> dict[str, Any]:
    """Return the schema with closed objects and bounds.

    schema: as `enforceable` returns it. bounds: the default ones.
    """
    return _Narrowing(schema.get("$defs", {}), bounds or DefaultBounds()).whole(schema)


class _Narrowing:
    """State of narrowing. definitions: by name; one that applies beside other schemas has an open copy."""

    def __init__(self, definitions: dict[str, Any], bounds: DefaultBounds) -> None:
        self._definitions = definitions
        self._bounds = bounds
        self._written: dict[str, Any] = {}
        self._waiting: list[str] = []

    def whole(self, schema: dict[str, Any]) -> dict[str, Any]:
        root = self._place({name: value for name, value in schema.items() if name != "$defs"})
        result = root if isinstance(root, dict) else {"allOf": [root]}
        while self._waiting:
            name = self._waiting.pop()
            if name.endswith(_OPEN):
                self._written[name] = self._part(self._definitions[name.removesuffix(_OPEN)])
            else:
                self._written[name] = self._place(self._definitions[name])
        return {"$defs": {**self._written, "anything": _with_short_names(_limits([{}], self._bounds))}, **result}

    def _refer(self, reference: str, suffix: str = "") -> dict[str, Any]:
        name = reference.rpartition("/")[2] + suffix
        if name not in self._written:
            self._written[name] = True
            self._waiting.append(name)
        return {"$ref": f"#/$defs/{name}"}

    def _place(self, schema: Any) -> Any:
        """Narrow a schema that applies alone to its instance."""
        if schema is False:
            return schema
        if schema is True or not schema:
            return _ANYTHING
        if schema.keys() == {"$ref"}:
            return self._refer(schema["$ref"])
        if schema.keys() == {"allOf"} and len(schema["allOf"]) == 1:
            return self._place(schema["allOf"][0])
        if "anyOf" in schema:
            return self._choice(schema)
        part = self._part(schema)
        parts = list(itertools.islice(self._parts(schema, set()), _MAX_PARTS + 1))
        limits = _limits(parts, self._bounds) if len(parts) <= _MAX_PARTS else {}
        if len(parts) > 1:
            return {**part, "allOf": [*part.get("allOf", []), _with_short_names(limits)]}
        properties = {**limits.get("properties", {}), **part.get("properties", {})}
        return _with_short_names({**limits, **part, **({"properties": properties} if properties else {})})

    def _choice(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Narrow branches, each together with the schemas beside them."""
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        kept = {"type": rest["type"]} if "type" in rest else {}
        if rest == kept:
            return {**kept, "anyOf": [self._place(branch) for branch in schema["anyOf"]]}
        return {"anyOf": [self._place({"allOf": [rest, branch]}) for branch in schema["anyOf"]]}

    def _part(self, schema: Any) -> Any:
        """Narrow a schema that applies beside others: it stays open, and its subschemas are narrowed."""
        if not isinstance(schema, dict):
            return schema
        out: dict[str, Any] = {}
        for name, value in schema.items():
            if name in ("properties", "patternProperties"):
                out[name] = {key: self._place(item) for key, item in value.items()}
            elif name in ("items", "additionalProperties"):
                out[name] = self._place(value)
            elif name == "prefixItems":
                out[name] = [self._place(item) for item in value]
            elif name == "$ref":
                out |= self._refer(value, _OPEN)
            elif name == "allOf":
                out.setdefault("allOf", []).extend(map(self._part, value))
            elif name == "anyOf":
                out[name] = [self._part(branch) for branch in value]
            else:
                out[name] = value
        return out

    def _parts(self, schema: Any, seen: set[str]) -> Iterator[dict[str, Any]]:
        """Schemas that apply to the same instance, this one first."""
        if not isinstance(schema, dict):
            return
        yield schema
        for name in _IN_PLACE:
            for branch in schema.get(name, ()):
                yield from self._parts(branch, seen)
        reference = schema.get("$ref")
        if reference is not None and reference not in seen:
            seen.add(reference)
            yield from self._parts(self._definitions[reference.rpartition("/")[2]], seen)


def _limits(parts: Sequence[dict[str, Any]], bounds: DefaultBounds) -> dict[str, Any]:
    """Default bounds of schemas that apply to the same instance; none beside constants."""
    said = set(itertools.chain.from_iterable(parts))
    if not said.isdisjoint({"const", "enum"}):
        return {}
    types = {name for part in parts for name in _listed(part.get("type", []))} or _TYPES
    limits: dict[str, Any] = {}
    patterns = _values(parts, "pattern")
    if "string" in types and "maxLength" not in said and all(ANY_TEXT in pattern for pattern in patterns):
        limits["maxLength"] = max([bounds.length, *_values(parts, "minLength")])
    if "array" in types:
        if "maxItems" not in said:
            limits["maxItems"] = max(
                [bounds.items, *_values(parts, "minItems"), *map(len, _values(parts, "prefixItems"))]
            )
        if "items" not in said:
            limits["items"] = _ANYTHING
    if not types.isdisjoint({"integer", "number"}):
        limits |= _number_limits(parts)
        if "number" in types and "multipleOf" not in said:
            limits["multipleOf"] = 10**-MAX_FRACTION_DIGITS
    return limits | _object_limits(parts, said) if "object" in types else limits


def _number_limits(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Default bounds of numbers. A bound of the schema beyond them replaces both."""
    limits: dict[str, Any] = {}
    lows, highs = (
        [*_values(parts, inclusive), *_values(parts, exclusive)]
        for inclusive, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
    )
    if not highs and max([0, *lows]) < _LARGEST:
        limits["maximum"] = _LARGEST
    if not lows and min([0, *highs]) > -_LARGEST:
        limits["minimum"] = -_LARGEST
    return limits


def _object_limits(parts: Sequence[dict[str, Any]], said: set[str]) -> dict[str, Any]:
    """Default bounds of objects: no further properties beside named ones, else a maximum number."""
    listed = {name: True for part in parts for name, item in part.get("properties", {}).items() if item is not False}
    required = dict.fromkeys(name for part in parts for name in part.get("required", ()))
    patterns = {pattern: True for part in parts for pattern in part.get("patternProperties", {})}
    unlisted = dict.fromkeys((name for name in required if name not in listed), True if patterns else _ANYTHING)
    names = {**listed, **unlisted}
    limits: dict[str, Any] = {}
    if "additionalProperties" not in said:
        if names:
            limits["properties"] = names
        if patterns:
            limits["patternProperties"] = patterns
        limits["additionalProperties"] = False if names or patterns else _ANYTHING
    # llguidance does not count properties beside optional ones.
    if "maxProperties" not in said and names.keys() <= required.keys():
        limits["maxProperties"] = len(required) + max([MAX_PROPERTIES, *_values(parts, "minProperties")])
    return limits


def _with_short_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Bound the length of property names."""
    rest = schema.get("additionalProperties", False)
    if rest is False or any(schema.get(name) for name in ("properties", "patternProperties", "required")):
        return schema
    return {**schema, "patternProperties": {_ANY_NAME: rest}, "additionalProperties": False}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _values(parts: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return [part[name] for part in parts if name in part]
