"""Subschemas of rewritten schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_BY_NAME = {"$defs", "properties", "patternProperties"}
_LISTS = {"allOf", "anyOf", "prefixItems"}
_SINGLE = {"items", "additionalProperties"}


def with_parts(schema: dict[str, Any], write: Callable[[Any], Any]) -> dict[str, Any]:
    """Copy a schema with its subschemas replaced."""
    out = dict(schema)
    for name in _BY_NAME & schema.keys():
        out[name] = {key: write(item) for key, item in schema[name].items()}
    for name in _LISTS & schema.keys():
        out[name] = [write(item) for item in schema[name]]
    for name in _SINGLE & schema.keys():
        out[name] = write(schema[name])
    return out


def parts_of(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a schema and all its subschemas."""
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            with_parts(part, left.append)
