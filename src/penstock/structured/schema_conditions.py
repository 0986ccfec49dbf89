"""Keywords of conditions, rewritten as one branch for each case."""

from __future__ import annotations

from typing import Any

from penstock.structured.schema_combinations import opposite
from penstock.structured.schema_objects import names_required, require
from penstock.structured.schema_walk import Handler, Place, Walk, escaped, is_list_of_texts, shown


def _if(walk: Walk, value: Any, place: Place) -> None:
    parts = [(name, place.schema[name]) for name in ("then", "else") if name in place.schema]
    at = place.at.rpartition("/")[0]
    outcomes = {name: walk.schema(part, f"{at}/{name}", place.depth + 1) for name, part in parts}
    condition, fails = walk.inner(value, place), opposite(walk, value, place)
    if walk.is_wide or not parts:
        return
    if fails is None:
        walk.cannot(place.at, "if: its opposite can be told of types, constants, bounds, sizes, and properties only")
    elif walk.may_branch(place, 2):
        cases = [_all_of(condition, outcomes.get("then", True)), _all_of(fails, outcomes.get("else", True))]
        place.out.setdefault("allOf", []).append({"anyOf": cases})


def _of_an_if(_walk: Walk, _value: Any, _place: Place) -> None:
    """then and else are rewritten with their if, and annotations without it."""


def _dependencies(walk: Walk, value: Any, place: Place) -> None:
    """Rewrite what properties require: it holds always if they are required, and else in one of two cases."""
    if not isinstance(value, dict):
        walk.refuse(place.at, f"{shown(value)} is not an object")
        return
    required = names_required(place.schema)
    added: list[str] = []
    for trigger, needed in value.items():
        at = f"{place.at}/{escaped(trigger)}"
        if is_list_of_texts(needed) and place.name != "dependentSchemas":
            if trigger in required:
                added += needed
            elif needed:
                _add_cases(walk, trigger, {"required": list(dict.fromkeys([trigger, *needed]))}, place, at)
        elif isinstance(needed, (dict, bool)) and place.name != "dependentRequired":
            part = walk.inner(needed, place, trigger)
            if trigger in required:
                place.out.setdefault("allOf", []).append(part)
            elif part not in (True, {}):
                _add_cases(walk, trigger, _all_of({"required": [trigger]}, part), place, at)
        else:
            kinds = {"dependentSchemas": "a schema", "dependentRequired": "an array of names"}
            walk.refuse(at, f"{shown(needed)} is not {kinds.get(place.name, 'an array of names or a schema')}")
    if added:
        require(walk, added, place)


def _add_cases(walk: Walk, trigger: str, present: Any, place: Place, at: str) -> None:
    """Add the cases of an object without a property, and with it."""
    where = Place(place.schema, place.out, place.name, at, place.depth)
    if not walk.is_wide and walk.may_branch(where, 2):
        place.out.setdefault("allOf", []).append({"anyOf": [{"properties": {trigger: False}}, present]})


def _all_of(*schemas: Any) -> Any:
    return {"allOf": list(schemas)}


HANDLERS: dict[str, Handler] = {
    "if": _if,
    "then": _of_an_if,
    "else": _of_an_if,
    "dependentRequired": _dependencies,
    "dependentSchemas": _dependencies,
    "dependencies": _dependencies,
}
