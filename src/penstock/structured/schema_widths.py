"""Objects whose optional properties are more than llguidance follows: each of them may come next, at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.structured.schema_parts import parts_of

# Optional properties that may come next. llguidance has four parser items for each, and the time for a mask grows with
# their square: 1,000 take 20 ms, 2,000 take 75 ms.
MAX_OPTIONAL = 2000
_IN_PLACE = ("allOf", "anyOf")
# Schemas and properties that are looked at, so that those that refer to the same ones many times take bounded time.
_MAX_STEPS = 1_000_000


def widest(schema: dict[str, Any]) -> int:
    """Number of optional properties that may come next, at the place where they are the most; counted a little beyond
    `MAX_OPTIONAL` only.

    schema: as rewritten by the walk, with its definitions.
    """
    most, num_steps = 0, 0
    for part in parts_of(schema):
        width = 0
        for applied in _applied(part, schema.get("$defs", {})):
            num_steps += 1 + len(applied.get("properties", ()))
            width += _optional_run(applied)
            if width > MAX_OPTIONAL or num_steps > _MAX_STEPS:
                break
        most = max(most, width)
        if most > MAX_OPTIONAL or num_steps > _MAX_STEPS:
            break
    return most


def _applied(schema: dict[str, Any], definitions: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas that apply to the same instance."""
    left: list[Any] = [schema]
    seen: set[str] = set()
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for name in _IN_PLACE:
            left += part.get(name, ())
        reference = part.get("$ref")
        if reference is not None and reference not in seen:
            seen.add(reference)
            left.append(definitions.get(reference.rpartition("/")[2]))


def _optional_run(schema: dict[str, Any]) -> int:
    """Most optional properties without a required one between them."""
    required = set(schema.get("required", ()))
    longest = run = 0
    for name in schema.get("properties", ()):
        run = 0 if name in required else run + 1
        longest = max(longest, run)
    return longest
