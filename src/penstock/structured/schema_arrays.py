"""Keywords of arrays."""

from __future__ import annotations

import itertools
import math
from typing import Any

from penstock.structured.schema_combinations import opposite
from penstock.structured.schema_constants import constants_of
from penstock.structured.schema_values import count
from penstock.structured.schema_walk import (
    NEWEST_DRAFT,
    OLD_DRAFTS,
    TYPES,
    Handler,
    Place,
    Walk,
    is_number,
    shown,
    unevaluated,
)

# Most items that contains asks for.
_MAX_CONTAINED = 16
# Most arrays of different constants that are listed.
_MAX_ARRANGEMENTS = 512
_NO_ARRAYS = [name for name in TYPES if name not in ("array", "integer")]


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


def _contains(walk: Walk, value: Any, place: Place) -> None:
    """Rewrite contains: the items that it asks for come first, or behind prefixItems where there is room."""
    counts = {name: place.schema[name] for name in ("minContains", "maxContains") if name in place.schema}
    if walk.draft in OLD_DRAFTS:
        counts = {}
    at = place.at.removesuffix("contains")
    item, other = walk.inner(value, place), opposite(walk, value, place) if "maxContains" in counts else True
    if not all(count(walk, number, f"{at}{name}") for name, number in counts.items()) or walk.is_wide:
        return
    least = int(counts.get("minContains", 1))
    if least > _MAX_CONTAINED:
        walk.cannot(place.at, f"contains: at most {_MAX_CONTAINED} items are counted, not minContains {least}")
        return
    first = place.schema.get("prefixItems", place.schema.get("items"))
    start, room = len(first) if isinstance(first, list) else 0, place.schema.get("maxItems")
    if room is not None and is_number(room) and room < start + least:
        start = 0
    if other is None:
        walk.cannot(place.at, "maxContains: what is not counted can be told of types, constants, bounds and sizes only")
        return
    items = [*[other] * start, *[item] * least]
    part: dict[str, Any] = {"minItems": len(items), "items": other}
    if "maxContains" in counts:
        items += [True] * min(int(counts["maxContains"]) - least, _MAX_CONTAINED)
        part = part if counts["maxContains"] >= least else {"type": _NO_ARRAYS}
    if items:
        part["prefixItems"] = items
    place.out.setdefault("allOf", []).append(part)


def _of_contains(walk: Walk, _value: Any, place: Place) -> None:
    """minContains and maxContains are rewritten with their contains, and annotations without it."""


def _unique_items(walk: Walk, value: Any, place: Place) -> None:
    """Rewrite uniqueItems: arrays of few constants are listed, each constant once at most."""
    most: Any = place.schema.get("maxItems")
    if not isinstance(value, bool):
        walk.refuse(place.at, f"{shown(value)} is not a boolean")
    if value is not True or walk.is_wide or (is_number(most) and most <= 1):
        return
    items = walk.inner(place.schema.get("items", True), place)
    constants = constants_of(items, walk.references.rewritten)
    if constants is None or "prefixItems" in place.schema:
        walk.cannot(place.at, "uniqueItems: grammars cannot compare items, unless they are of one list of constants")
        return
    least = place.schema.get("minItems", 0)
    sizes = [size for size in range(len(constants) + 1) if not is_number(least) or size >= least]
    sizes = [size for size in sizes if not is_number(most) or size <= most]
    for arranged, number in ((itertools.permutations, math.perm), (itertools.combinations, math.comb)):
        if sum(number(len(constants), size) for size in sizes) <= _MAX_ARRANGEMENTS:
            arrays = [list(one) for size in sizes for one in arranged(constants, size)]
            others = {"type": _NO_ARRAYS}
            place.out.setdefault("allOf", []).append({"anyOf": [others, {"enum": arrays}] if arrays else [others]})
            return
    walk.cannot(place.at, f"uniqueItems: {len(constants)} constants have more than {_MAX_ARRANGEMENTS} arrangements")


HANDLERS: dict[str, Handler] = {
    "items": _items,
    "prefixItems": _prefix_items,
    "additionalItems": _additional_items,
    "unevaluatedItems": _unevaluated_items,
    "minItems": _count,
    "maxItems": _count,
    "uniqueItems": _unique_items,
    "contains": _contains,
    "minContains": _of_contains,
    "maxContains": _of_contains,
}
