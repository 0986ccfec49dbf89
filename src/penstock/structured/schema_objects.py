"""Keywords of objects."""

from __future__ import annotations

from typing import Any

from penstock.structured.schema_values import count, translated
from penstock.structured.schema_walk import (
    Handler,
    Place,
    Walk,
    can_be_written,
    escaped,
    is_list_of_texts,
    shown,
    unevaluated,
)

# Limit of name patterns in a schema. llguidance compares all pairs: 100 take 0.1 s, 200 1.6 s, and 300 21 s.
_MAX_PATTERNS = 200
_CANNOT_BE_WRITTEN = "a name with control characters cannot be written"


def _properties(walk: Walk, value: Any, place: Place) -> None:
    if not isinstance(value, dict):
        walk.refuse(place.at, f"{shown(value)} is not an object of schemas")
        return
    for name in value:
        if not can_be_written(name):
            walk.refuse(f"{place.at}/{escaped(name)}", _CANNOT_BE_WRITTEN)
    place.out["properties"] = {name: walk.inner(item, place, name) for name, item in value.items()}


def _pattern_properties(walk: Walk, value: Any, place: Place) -> None:
    if not isinstance(value, dict):
        walk.refuse(place.at, f"{shown(value)} is not an object of schemas")
        return
    walk.num_patterns += len(value)
    if walk.num_patterns > _MAX_PATTERNS:
        walk.refuse(place.at, f"more than {_MAX_PATTERNS} patterns of names in a schema")
        return
    patterns: dict[str, Any] = {}
    for pattern, item in value.items():
        at = f"{place.at}/{escaped(pattern)}"
        name = translated(walk, pattern, at)
        if name in patterns:
            walk.refuse(at, "two patterns that are the same")
        patterns[name] = walk.inner(item, place, pattern)
    if patterns:
        place.out["patternProperties"] = patterns


def _additional_properties(walk: Walk, value: Any, place: Place) -> None:
    if "propertyNames" not in place.schema:
        place.out["additionalProperties"] = walk.inner(value, place)


def _unevaluated_properties(walk: Walk, value: Any, place: Place) -> None:
    if "additionalProperties" in place.schema:
        return
    if value is True or value == {}:
        # Explicit, since schema_narrowing makes the default false.
        place.out["additionalProperties"] = True
    else:
        unevaluated(walk, value, place, "additionalProperties", also="propertyNames")


def _property_names(walk: Walk, value: Any, place: Place) -> None:
    """Rewrite propertyNames with a pattern or an enum as the only allowed properties."""
    names = walk.inner(value, place)
    rest = walk.inner(place.schema.get("additionalProperties", True), place)
    if isinstance(names, dict) and names.get("type") == "string":
        del names["type"]
    if names is True or names == {}:
        place.out["additionalProperties"] = rest
    elif "properties" in place.schema or "patternProperties" in place.schema:
        walk.refuse(place.at, "propertyNames together with properties or patternProperties")
    elif isinstance(names, dict) and names.keys() == {"pattern"}:
        place.out["patternProperties"] = {names["pattern"]: rest}
        place.out["additionalProperties"] = False
    elif isinstance(names, dict) and names.keys() == {"enum"}:
        place.out["properties"] = {name: rest for name in names["enum"] if isinstance(name, str)}
        place.out["additionalProperties"] = False
    else:
        walk.refuse(place.at, "propertyNames other than a pattern or an enum cannot be enforced")


def _required(walk: Walk, value: Any, place: Place) -> None:
    if not is_list_of_texts(value):
        walk.refuse(place.at, f"{shown(value)} is not an array of strings")
        return
    if not all(map(can_be_written, value)):
        walk.refuse(place.at, _CANNOT_BE_WRITTEN)
    place.out["required"] = list(dict.fromkeys([*place.out.get("required", []), *value]))


def _min_properties(walk: Walk, value: Any, place: Place) -> None:
    """Check minProperties: a repeated name counts twice, so above 1 only required names suffice."""
    if not count(walk, value, place.at):
        return
    num_required = len(_names_required(place))
    if value <= num_required:
        return
    if value > 1:
        walk.refuse(place.at, f"minProperties: at most 1, or the number of required names, {num_required}")
    place.out["minProperties"] = int(value)


def _max_properties(walk: Walk, value: Any, place: Place) -> None:
    if count(walk, value, place.at):
        place.out["maxProperties"] = int(value)


def _dependencies(walk: Walk, value: Any, place: Place) -> None:
    """Rewrite dependencies of required properties as required properties."""
    if not isinstance(value, dict):
        walk.refuse(place.at, f"{shown(value)} is not an object")
        return
    for trigger, needed in value.items():
        if needed in ([], {}) or needed is True:
            continue
        if trigger in _names_required(place) and is_list_of_texts(needed):
            place.out["required"] = list(dict.fromkeys([*place.out.get("required", []), *needed]))
        else:
            at = f"{place.at}/{escaped(trigger)}"
            walk.refuse(at, f"{place.name} cannot be enforced; use anyOf with a branch for each case")


def _names_required(place: Place) -> set[str]:
    """Names required in all objects."""
    required = place.schema.get("required", [])
    return set(required) if is_list_of_texts(required) else set()


HANDLERS: dict[str, Handler] = {
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "unevaluatedProperties": _unevaluated_properties,
    "propertyNames": _property_names,
    "required": _required,
    "minProperties": _min_properties,
    "maxProperties": _max_properties,
    "dependentRequired": _dependencies,
    "dependencies": _dependencies,
}
