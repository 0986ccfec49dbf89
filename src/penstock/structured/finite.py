"""Definitions that nothing finite is valid for, since each instance would have to contain another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONTAINERS = {"object", "array"}


def endless(definitions: Mapping[str, Any]) -> list[str]:
    """The names of the definitions that have no finite instance, among schemas as they are written anew."""
    finite: set[str] = set()
    left = list(definitions)
    num_before = len(left) + 1
    while len(left) < num_before:
        num_before = len(left)
        for name in left:
            if _may_end(definitions[name], finite):
                finite.add(name)
        left = [name for name in left if name not in finite]
    return left


def _may_end(schema: Any, finite: set[str]) -> bool:
    """Whether a schema may have a finite instance if these definitions have one."""
    if not isinstance(schema, dict):
        return schema is not False
    if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in finite:
        return False
    if not all(_may_end(branch, finite) for branch in schema.get("allOf", ())):
        return False
    for name in ("anyOf", "oneOf"):
        if name in schema and not any(_may_end(branch, finite) for branch in schema[name]):
            return False
    types = schema.get("type")
    listed = {types} if isinstance(types, str) else set(types or ())
    if "const" in schema or "enum" in schema or not listed or listed - _CONTAINERS:
        return True
    return ("object" in listed and _object_may_end(schema, finite)) or (
        "array" in listed and _array_may_end(schema, finite)
    )


def _object_may_end(schema: dict[str, Any], finite: set[str]) -> bool:
    properties = schema.get("properties", {})
    return all(_may_end(properties.get(name, True), finite) for name in schema.get("required", ()))


def _array_may_end(schema: dict[str, Any], finite: set[str]) -> bool:
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    num_needed = schema.get("minItems", 0)
    needed = [*first[:num_needed], *([rest] if num_needed > len(first) else [])]
    return all(_may_end(item, finite) for item in needed)
