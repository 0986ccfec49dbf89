"""Keywords of references, types, constants and combinations."""

from __future__ import annotations

from typing import Any

from penstock.structured.keywords import ANNOTATIONS
from penstock.structured.negation import negated, negated_for_types
from penstock.structured.schema_constants import check_constants
from penstock.structured.schema_exclusion import Exclusion
from penstock.structured.schema_walk import TYPES, Handler, Place, Walk, shown

# References whose targets are copied into one schema.
_MAX_COPIES = 1000


def _reference(walk: Walk, value: Any, place: Place) -> None:
    """Rewrite a reference. What is beside it counts too, though old drafts pass over that."""
    target, why_not = walk.references.resolve(value)
    if target is None:
        walk.cannot(place.at, why_not)
    elif walk.references.is_circular(target):
        walk.refuse(place.at, f"{value!r} leads back to itself without going any deeper")
    elif walk.is_wide:
        _copy(walk, target, place)
    else:
        place.out["$ref"] = walk.references.define(target, walk.definition)


def _copy(walk: Walk, target: str, place: Place) -> None:
    """Put the target of a reference in its place, unless it is within itself there, or copies become too many."""
    if target in walk.copying or walk.num_copies >= _MAX_COPIES:
        return
    walk.copying.add(target)
    walk.num_copies += 1
    place.out.setdefault("allOf", []).append(walk.schema(walk.references.target(target), target, place.depth + 1))
    walk.copying.remove(target)


def _type(walk: Walk, value: Any, place: Place) -> None:
    types = value if isinstance(value, list) else [value]
    if not types or any(not isinstance(name, str) or name not in TYPES for name in types):
        walk.refuse(place.at, f"{shown(value)} is not a type; types are {', '.join(TYPES)}")
        return
    if "number" in types:
        types = [name for name in types if name != "integer"]
    place.out["type"] = types if len(types) > 1 else types[0]


def _enum(walk: Walk, value: Any, place: Place) -> None:
    if not isinstance(value, list) or not value:
        walk.refuse(place.at, f"{shown(value)} is not a non-empty array")
        return
    why_not = check_constants(value)
    if why_not:
        walk.cannot(place.at, why_not)
    else:
        place.out["enum"] = value


def _const(walk: Walk, value: Any, place: Place) -> None:
    why_not = check_constants([value])
    if why_not:
        walk.cannot(place.at, why_not)
    else:
        place.out["const"] = value


def _branches(walk: Walk, value: Any, place: Place) -> None:
    if not isinstance(value, list) or not value:
        walk.refuse(place.at, f"{shown(value)} is not a non-empty array of schemas")
        return
    if place.name == "oneOf" and not walk.is_wide:
        branches = _one_of(walk, value, place)
    else:
        branches = [walk.inner(branch, place, index) for index, branch in enumerate(value)]
    if place.name == "allOf":
        place.out.setdefault("allOf", []).extend(branches)
    elif "anyOf" in place.schema and place.name == "oneOf":
        place.out.setdefault("allOf", []).append({"anyOf": branches})
    elif branches:
        place.out["anyOf"] = branches


def _one_of(walk: Walk, value: list[Any], place: Place) -> list[Any]:
    """Rewrite the branches of a oneOf, each without what may be valid for another one."""
    exclusion = Exclusion(walk.references.rewritten)
    branches = [walk.inner(branch, place, index) for index, branch in enumerate(value)]
    wide = [walk.wide(branch, place, index) for index, branch in enumerate(value)]
    written = []
    for index, branch in enumerate(branches):
        apart = [
            negated_for_types(other, shared, alone) if _tells(value[number], other) else None
            for number, other in enumerate(wide)
            if number != index
            for shared, alone in [exclusion.types(branch, other)]
            if shared
        ]
        if None in apart:
            walk.cannot(place.at, "oneOf: its branches are not known to exclude each other, and cannot be kept apart")
            return branches
        written.append({"allOf": [branch, *apart]} if apart else branch)
    return written


def opposite(walk: Walk, value: Any, place: Place, *path: str | int) -> Any:
    """Return a schema of instances that are invalid for the subschema of a keyword; None if none is known."""
    wide = walk.wide(value, place, *path)
    return negated(wide) if _tells(value, wide) else None


def _tells(schema: Any, wide: Any) -> bool:
    """Whether the wide form of a schema has a keyword left, or the schema itself has none."""
    return wide not in (True, {}) or schema in (True, {})


def _not(walk: Walk, value: Any, place: Place) -> None:
    asserted = {name for name in value if name not in ANNOTATIONS} if isinstance(value, dict) else set()
    if asserted == {"not"}:
        complement = walk.inner(value["not"], place, "not")
    elif walk.is_wide:
        walk.inner(value, place)
        return
    else:
        complement = opposite(walk, value, place)
    if complement is None:
        walk.cannot(place.at, "not: the rest can be told of types, constants, bounds, sizes, and properties only")
        return
    place.out.setdefault("allOf", []).append(complement)


HANDLERS: dict[str, Handler] = {
    "$ref": _reference,
    "type": _type,
    "enum": _enum,
    "const": _const,
    "allOf": _branches,
    "anyOf": _branches,
    "oneOf": _branches,
    "not": _not,
}
