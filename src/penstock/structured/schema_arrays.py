"""Keywords of arrays."""

from __future__ import annotations

from typing import Any

from penstock.structured.schema_values import count
from penstock.structured.schema_walk import NEWEST_DRAFT, Handler, Place, Walk, is_number, shown, unevaluated


def _items(walk: Walk, value: Any, place: Place) -> None:
    if not isinstance(value, list):
        place.out["items"] = walk.inner(value, place)
        return
    if walk.draft == NEWEST_DRAFT:
        walk.refuse(place.at, "an array of schemas is for older drafts; use prefixItems")
    place.out["prefixItems"] = [walk.inner(item, place, index) for index, item in enumerate(value)]
    if "additionalItems" in place.schema:
        place.out["items"] = walk.inner(place.schema["additionalItems"], place)


def _prefix_items(walk: Walk, value: Any, place: Place) -> None:
    if walk.draft not in (None, NEWEST_DRAFT):
        walk.refuse(place.at, f"prefixItems is not known in {walk.draft}; use a list under items")
    if isinstance(place.schema.get("items"), list):
        walk.refuse(place.at, "prefixItems conflicts with an array in items")
    if not isinstance(value, list) or not value:
        walk.refuse(place.at, f"{shown(value)} is not a non-empty array of schemas")
        return
    place.out["prefixItems"] = [walk.inner(item, place, index) for index, item in enumerate(value)]


def _additional_items(walk: Walk, _: Any, place: Place) -> None:
    """Check additionalItems: it belongs to a list under items, and is ignored otherwise."""
    if walk.draft == NEWEST_DRAFT:
        walk.refuse(place.at, "additionalItems belongs to older drafts; use items beside prefixItems")
    elif "prefixItems" in place.schema:
        walk.refuse(place.at, "additionalItems together with prefixItems; use items")


def _unevaluated_items(walk: Walk, value: Any, place: Place) -> None:
    is_decided = "items" in place.schema and not isinstance(place.schema["items"], list)
    if not is_decided and "additionalItems" not in place.schema:
        unevaluated(walk, value, place, "items", also="contains")


def _count(walk: Walk, value: Any, place: Place) -> None:
    if count(walk, value, place.at):
        place.out[place.name] = int(value)


def _unique_items(walk: Walk, value: Any, place: Place) -> None:
    most: Any = place.schema.get("maxItems")
    if not isinstance(value, bool):
        walk.refuse(place.at, f"{shown(value)} is not a boolean")
    elif value and not (is_number(most) and most <= 1):
        walk.refuse(place.at, "uniqueItems: grammars cannot compare items")


HANDLERS: dict[str, Handler] = {
    "items": _items,
    "prefixItems": _prefix_items,
    "additionalItems": _additional_items,
    "unevaluatedItems": _unevaluated_items,
    "minItems": _count,
    "maxItems": _count,
    "uniqueItems": _unique_items,
}
