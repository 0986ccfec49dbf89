"""Keywords of references, types, constants and combinations."""

from __future__ import annotations

from typing import Any

from penstock.structured.keywords import ANNOTATIONS
from penstock.structured.negation import negated
from penstock.structured.schema_constants import check_constants
from penstock.structured.schema_walk import OLD_DRAFTS, Handler, Place, Walk, shown

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def _reference(walk: Walk, value: Any, place: Place) -> None:
    target, why_not = walk.references.resolve(value)
    if target is None:
        walk.refuse(place.at, why_not)
        return
    hidden = [name for name in place.schema if name in walk.handlers and name != "$ref"]
    if hidden and walk.draft in OLD_DRAFTS:
        walk.refuse(place.at, f"{walk.draft} passes over {', '.join(hidden)} beside a $ref; put both into allOf")
    if walk.references.is_circular(target):
        walk.refuse(place.at, f"{value!r} leads back to itself without going any deeper")
        return
    place.out["$ref"] = walk.references.define(target, walk.definition)


def _type(walk: Walk, value: Any, place: Place) -> None:
    types = value if isinstance(value, list) else [value]
    if not types or any(not isinstance(name, str) or name not in _TYPES for name in types):
        walk.refuse(place.at, f"{shown(value)} is not a type; types are {', '.join(_TYPES)}")
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
        walk.refuse(place.at, why_not)
    place.out["enum"] = value


def _const(walk: Walk, value: Any, place: Place) -> None:
    why_not = check_constants([value])
    if why_not:
        walk.refuse(place.at, why_not)
    place.out["const"] = value


def _branches(walk: Walk, value: Any, place: Place) -> None:
    if not isinstance(value, list) or not value:
        walk.refuse(place.at, f"{shown(value)} is not a non-empty array of schemas")
        return
    branches = [walk.inner(branch, place, index) for index, branch in enumerate(value)]
    if place.name == "allOf":
        place.out.setdefault("allOf", []).extend(branches)
    elif place.name == "anyOf":
        place.out["anyOf"] = branches
    else:
        # Branches are inlined, to see whether they exclude each other.
        place.out["oneOf"] = [walk.references.inlined(branch) for branch in branches]


def _not(walk: Walk, value: Any, place: Place) -> None:
    asserted = {name for name in value if name not in ANNOTATIONS} if isinstance(value, dict) else set()
    # An enforced format excludes more than a validator may; its complement would allow more.
    walk.num_negations += 1
    is_double = asserted == {"not"}
    complement = walk.inner(value["not"], place, "not") if is_double else negated(walk.inner(value, place))
    walk.num_negations -= 1
    if complement is None:
        walk.refuse(place.at, "not: the rest can be told of types, bounds, sizes, and required properties only")
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
