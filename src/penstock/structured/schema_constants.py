"""Constants that llguidance represents exactly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.structured.schema_walk import can_be_written, is_number

LARGEST_INTEGER = 2**53


def is_binary_fraction(value: float) -> bool:
    """Whether whole multiples of a number are exact in binary floating point: whole numbers, 0.5, 0.25 and so on."""
    if abs(value) > LARGEST_INTEGER:
        return False
    return float(value).is_integer() or float(value * 2**10).is_integer()


def check_constants(values: Iterable[Any]) -> str:
    """Return why one of these values cannot be enforced; empty if all can."""
    return next(filter(None, map(_why_not, values)), "")


def _why_not(value: Any) -> str:
    if is_number(value) and abs(value) > LARGEST_INTEGER:
        return f"{value}: numbers beyond {LARGEST_INTEGER} are not exact"
    if isinstance(value, str) and not can_be_written(value):
        return f"{value!r} has control characters, which cannot be written"
    if isinstance(value, list):
        return check_constants(value)
    return check_constants([*value, *value.values()]) if isinstance(value, dict) else ""
