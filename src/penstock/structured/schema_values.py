"""Keywords of strings and numbers."""

from __future__ import annotations

from typing import Any

from penstock.structured.patterns import MAX_REPEATED, PatternError, translate_search
from penstock.structured.schema_constants import LARGEST_INTEGER, is_binary_fraction, is_decimal_fraction
from penstock.structured.schema_formats import FORMATS
from penstock.structured.schema_walk import OLDEST_DRAFT, Handler, Place, Walk, is_number, shown


def count(walk: Walk, value: Any, at: str) -> bool:
    """Whether a value is a valid count; refuses it otherwise."""
    if is_number(value) and 0 <= value <= LARGEST_INTEGER and value == int(value):
        return True
    walk.refuse(at, f"{shown(value)} is not a non-negative integer")
    return False


def translated(walk: Walk, pattern: Any, at: str) -> str | None:
    """Translate a regular expression for llguidance; None for one that cannot be enforced, which is noted."""
    if not isinstance(pattern, str):
        walk.refuse(at, f"{shown(pattern)} is not a regular expression")
        return None
    try:
        return translate_search(pattern)
    except PatternError as error:
        walk.cannot(at, f"the pattern {error.what}")
        return None


def _length(walk: Walk, value: Any, place: Place) -> None:
    if not count(walk, value, place.at):
        return
    if place.name == "minLength" and value > MAX_REPEATED:
        walk.refuse(place.at, f"minLength: at most {MAX_REPEATED:,}, since no output is longer")
    place.out[place.name] = min(int(value), MAX_REPEATED)


def _pattern(walk: Walk, value: Any, place: Place) -> None:
    pattern = translated(walk, value, place.at)
    if pattern is not None:
        place.out["pattern"] = pattern


def _format(walk: Walk, value: Any, place: Place) -> None:
    """Enforce a known format, which excludes more than a validator may: one that passes over it does not count here."""
    if not isinstance(value, str):
        walk.refuse(place.at, f"{shown(value)} is not the name of a format")
    elif value not in FORMATS:
        walk.warn(place.at, f"the format {shown(value)} is not enforced; use a pattern")
    elif not walk.is_wide:
        place.out.setdefault("allOf", []).append(FORMATS[value])


def _bound(walk: Walk, value: Any, place: Place) -> None:
    name = place.name
    if name.startswith("exclusive") and isinstance(value, bool):
        _old_exclusive_bound(walk, value, place)
    elif not is_number(value):
        walk.refuse(place.at, f"{shown(value)} is not a number")
    elif abs(value) > LARGEST_INTEGER:
        walk.cannot(place.at, f"{name}: numbers beyond {LARGEST_INTEGER} are not exact")
    elif place.schema.get(f"exclusive{name.title()}") is True:
        place.out[f"exclusive{name.title()}"] = value
    else:
        place.out[name] = value


def _old_exclusive_bound(walk: Walk, value: bool, place: Place) -> None:
    """Check a boolean exclusiveMinimum or exclusiveMaximum of draft 4, which is rewritten with its bound."""
    inclusive = place.name.removeprefix("exclusive").lower()
    if walk.draft not in (None, OLDEST_DRAFT):
        walk.refuse(place.at, f"{place.name} is a number, as {inclusive} is; true and false belong to draft 4")
    elif value and inclusive not in place.schema:
        walk.refuse(place.at, f"{place.name} without {inclusive}")


def _multiple_of(walk: Walk, value: Any, place: Place) -> None:
    if not is_number(value) or value <= 0:
        walk.refuse(place.at, f"{shown(value)} is not a number above 0")
    elif not (is_binary_fraction(value) or is_decimal_fraction(value)):
        walk.cannot(place.at, "multipleOf: whole numbers and fractions such as 0.5 or 0.01 can be enforced")
    else:
        place.out["multipleOf"] = value


HANDLERS: dict[str, Handler] = {
    "minLength": _length,
    "maxLength": _length,
    "pattern": _pattern,
    "format": _format,
    "minimum": _bound,
    "maximum": _bound,
    "exclusiveMinimum": _bound,
    "exclusiveMaximum": _bound,
    "multipleOf": _multiple_of,
}
