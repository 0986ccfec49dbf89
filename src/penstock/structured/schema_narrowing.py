"""Closed objects and default bounds: what is generated of a schema that says nothing of further properties or of sizes.

JSON Schema leaves objects open and texts, arrays and numbers without bounds, so that an output may go on for ever. Here
each place gets a subset of what is valid there. Schemas that apply to the same instance (allOf, anyOf, $ref) see each
other's properties.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_LENGTH = 4096
MAX_ITEMS = 256
MAX_DIGITS = 15
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_OPEN = "-open"


def narrowed(schema: dict[str, Any]) -> dict[str, Any]:
    """A subset of a schema whose objects are closed and whose texts, arrays and integers are bounded.

    schema: as `enforceable` writes it. Branches of oneOf become those of anyOf, since closed objects would seem to
    exclude each other; a caller checks with the schema itself that they do.
    """
    return _Narrowing(schema.get("$defs", {})).whole(schema)


class _Narrowing:
    """definitions: of the schema, by name. Those that apply in place beside other schemas are kept open in a copy."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self._definitions = definitions
        self._written: dict[str, Any] = {}
        self._waiting: list[str] = []

    def whole(self, schema: dict[str, Any]) -> dict[str, Any]:
        root = {name: value for name, value in schema.items() if name != "$defs"}
        result: dict[str, Any] = self._place(root)
        while self._waiting:
            name = self._waiting.pop()
            if name.endswith(_OPEN):
                self._written[name] = self._part(self._definitions[name.removesuffix(_OPEN)])
            else:
                self._written[name] = self._place(self._definitions[name])
        return {"$defs": self._written, **result} if self._written else result

    def _refer(self, reference: str, suffix: str = "") -> str:
        name = reference.rpartition("/")[2] + suffix
        if name not in self._written:
            self._written[name] = True
            self._waiting.append(name)
        return f"#/$defs/{name}"

    def _place(self, schema: Any) -> Any:
        """A schema that alone says what an instance is."""
        if not isinstance(schema, dict):
            return schema
        others = schema.keys() - {"type"}
        if others == {"$ref"} and "type" not in schema:
            return {"$ref": self._refer(schema["$ref"])}
        if len(others) == 1 and others <= set(_IN_PLACE) and (others != {"allOf"} or len(schema["allOf"]) == 1):
            (name,) = others
            kept = {"type": schema["type"]} if "type" in schema else {}
            return {**kept, "anyOf": [self._place(branch) for branch in schema[name]]}
        if "$ref" in schema or not schema.keys().isdisjoint(_IN_PLACE):
            return self._combined(schema)
        out = self._part(schema)
        _bound(out)
        names, patterns, is_open = self._names(schema)
        if (names or patterns) and not is_open:
            out["additionalProperties"] = False
            out["properties"] = {**dict.fromkeys(names, True), **out.get("properties", {})}
        return out

    def _combined(self, schema: dict[str, Any]) -> Any:
        """Several schemas for the same instance, with the properties of them all."""
        out = self._part(schema)
        names, patterns, is_open = self._names(schema)
        if (names or patterns) and not is_open:
            closing = {"properties": dict.fromkeys(names, True), "additionalProperties": False}
            if patterns:
                closing["patternProperties"] = dict.fromkeys(patterns, True)
            out["allOf"] = [*out.get("allOf", []), closing]
        return out

    def _part(self, schema: Any) -> Any:
        """A schema to which others are added: it stays open, and what lies within it is narrowed."""
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
                out[name] = self._refer(value, _OPEN)
            elif name == "oneOf":
                out.setdefault("allOf", []).append({"anyOf": [self._part(branch) for branch in value]})
            elif name == "allOf":
                out["allOf"] = [*out.get("allOf", []), *map(self._part, value)]
            elif name == "anyOf":
                out[name] = [self._part(branch) for branch in value]
            else:
                out[name] = value
        return out

    def _names(self, schema: dict[str, Any]) -> tuple[dict[str, None], dict[str, None], bool]:
        """The names and patterns of properties, and whether something is said of others."""
        names: dict[str, None] = {}
        patterns: dict[str, None] = {}
        is_open = False
        for part in self._in_place(schema, set()):
            listed = part.get("properties", {})
            names |= dict.fromkeys(name for name, item in listed.items() if item is not False)
            names |= dict.fromkeys(part.get("required", ()))
            patterns |= dict.fromkeys(part.get("patternProperties", {}))
            is_open = is_open or "additionalProperties" in part
        return names, patterns, is_open

    def _in_place(self, schema: Any, seen: set[str]) -> Iterator[dict[str, Any]]:
        """The schemas that apply to the same instance."""
        if not isinstance(schema, dict):
            return
        yield schema
        for name in _IN_PLACE:
            for branch in schema.get(name, ()):
                yield from self._in_place(branch, seen)
        reference = schema.get("$ref")
        if reference is not None and reference not in seen:
            seen.add(reference)
            yield from self._in_place(self._definitions[reference.rpartition("/")[2]], seen)


def _bound(schema: dict[str, Any]) -> None:
    """Give texts, arrays and integers without an upper bound a generous one."""
    if "enum" in schema or "const" in schema:
        return
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if "string" in types and schema.keys().isdisjoint({"maxLength", "pattern", "format"}):
        schema["maxLength"] = max(MAX_LENGTH, schema.get("minLength", 0))
    if "array" in types and "maxItems" not in schema:
        schema["maxItems"] = max(MAX_ITEMS, schema.get("minItems", 0), len(schema.get("prefixItems", ())))
    largest = 10**MAX_DIGITS - 1
    if "integer" in types or "number" in types:
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        # A bound that lies beyond the default ones stays the only one.
        if high is None and (low is None or low < largest) and "multipleOf" not in schema:
            schema["maximum"] = largest
        if low is None and (high is None or high > -largest) and "multipleOf" not in schema:
            schema["minimum"] = -largest
