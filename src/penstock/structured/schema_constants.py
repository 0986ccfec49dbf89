"""Constants that llguidance represents exactly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from penstock.structured.schema_parts import parts_of
from penstock.structured.schema_walk import can_be_written, is_number

LARGEST_INTEGER = 2**53
_LAST_DIGIT = Decimal("1e-10")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
_NUMBERED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def is_binary_fraction(value: float) -> bool:
    """Whether whole multiples of a number are exact in binary floating point: whole numbers, 0.5, 0.25 and so on."""
    if abs(value) > LARGEST_INTEGER:
        return False
    return float(value).is_integer() or float(value * 2**10).is_integer()


def is_decimal_fraction(value: float) -> bool:
    """Whether a number has 10 digits behind the point at most, so that its multiples are seen by their digits."""
    if abs(value) > LARGEST_INTEGER:
        return False
    return Decimal(repr(value)) % _LAST_DIGIT == 0


def type_of(value: Any) -> str:
    """Type of a value; a number's is "number"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def constants_of(schema: Any, rewritten: Callable[[str], Any]) -> list[Any] | None:
    """Different values that a rewritten schema lists; None if it lists none. rewritten: definition of a reference."""
    while isinstance(schema, dict) and schema.keys() == {"$ref"}:
        schema = rewritten(schema["$ref"])
    if not isinstance(schema, dict) or not schema.keys() & {"const", "enum"}:
        return None
    found = {as_key(value): value for value in schema.get("enum", [schema.get("const")])}
    types = schema.get("type", sorted({*map(type_of, found.values())}))
    listed = {"number" if name == "integer" else name for name in ([types] if isinstance(types, str) else types)}
    return [value for value in found.values() if type_of(value) in listed]


def as_key(value: Any) -> str:
    """Text that is the same for values that are equal in JSON."""
    return json.dumps(_without_zeros(value), sort_keys=True)


def _without_zeros(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_without_zeros(item) for item in value]
    return {name: _without_zeros(item) for name, item in value.items()} if isinstance(value, dict) else value


def check_constants(values: Iterable[Any]) -> str:
    """Return why one of these values cannot be enforced; empty if all can."""
    return next(filter(None, map(_why_not, values)), "")


def _why_not(value: Any) -> str:
    if is_number(value) and abs(value) > LARGEST_INTEGER:
        return f"{value}: numbers beyond {LARGEST_INTEGER} are not exact"
    if isinstance(value, list):
        return check_constants(value)
    if not isinstance(value, dict):
        return ""
    strange = next((name for name in value if not can_be_written(name)), None)
    if strange is not None:
        return f"{strange!r} is a name with control characters, which cannot be written"
    return check_constants(value.values())


def has_controls(text: str) -> bool:
    """Whether a text has control characters, with escapes of their own or without."""
    return _CONTROLS.search(text) is not None


def needs_numbered_escapes(schema: dict[str, Any]) -> bool:
    r"""Whether a constant of a rewritten schema has characters that JSON, or llguidance, writes as \u escapes only."""
    left = [part[name] for part in parts_of(schema) for name in ("const", "enum") if name in part]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list):
            left += part
        elif isinstance(part, str) and _NUMBERED.search(part):
            return True
    return False
