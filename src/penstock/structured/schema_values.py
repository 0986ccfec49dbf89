"""Keywords of strings and numbers."""

from __future__ import annotations

from typing import Any

from penstock.structured.patterns import MAX_REPEATED, PatternError, translate_search
from penstock.structured.schema_constants import LARGEST_INTEGER, is_binary_fraction
from penstock.structured.schema_formats import FORMATS
from penstock.structured.schema_walk import OLDEST_DRAFT, Handler, Place, Walk, is_number, shown


def count(walk: Walk, value: Any, at: str) -> bool:
    """Whether a value is a valid count; refuses it otherwise."""
    if is_number(value) and 0 <= value <= LARGEST_INTEGER and value == int(value):
        return True
    walk.refuse(at, f"{shown(value)} is not a non-negative integer")
    return False


def translated(walk: Walk, pattern: Any, at: str) -> str:
    """Translate a regular expression for llguidance; refuse one that cannot be enforced."""
    if not isinstance(pattern, str):
        walk.refuse(at, f"{shown(pattern)} is not a regular expression")
        return ""
    try:
        return translate_search(pattern)
    except PatternError as error:
        walk.refuse(at, f"the pattern {error.what}")
        return ""


def _length(walk: Walk, value: Any, place: Place) -> None:
    if not count(walk, value, place.at):
        return
    if place.name == "minLength" and value > MAX_REPEATED:
        walk.refuse(place.at, f"minLength: at most {MAX_REPEATED:,}, since no output is longer")
    place.out[place.name] = min(int(value), MAX_REPEATED)


def _pattern(walk: Walk, value: Any, place: Place) -> None:
    place.out["pattern"] = translated(walk, value, place.at)


def _format(walk: Walk, value: Any, place: Place) -> None:
    if walk.num_negations:
        walk.refuse(place.at, "format: under `not` it cannot be enforced, since validators may pass over it")
    elif isinstance(value, str) and value in FORMATS:
        place.out.setdefault("allOf", []).append(FORMATS[value])
    else:
        known = ", ".join(sorted(FORMATS))
        walk.refuse(place.at, f"{shown(value)} cannot be enforced; use a pattern, or one of {known}")


def _bound(walk: Walk, value: Any, place: Place) -> None:
    name = place.name
    if name.startswith("exclusive") and isinstance(value, bool):
        _old_exclusive_bound(walk, value, place)
    elif not is_number(value):
        walk.refuse(place.at, f"{shown(value)} is not a number")
    elif abs(value) > LARGEST_INTEGER:
        walk.refuse(place.at, f"{name}: numbers beyond {LARGEST_INTEGER} are not exact")
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
    elif not is_binary_fraction(value):
        walk.refuse(place.at, "multipleOf: validators round fractions such as 0.1 and do not agree; use whole numbers")
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
