"""Keywords of objects."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

from penstock.structured.keywords import ANNOTATIONS
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
# Limit of properties in an object. llguidance compares all pairs: 5,000 take 2 s, 30,000 minutes.
_MAX_PROPERTIES = 5000
# Most choices of names that fulfil minProperties.
_MAX_CHOICES_OF_NAMES = 32
_CANNOT_BE_WRITTEN = "a name with control characters cannot be written"


def _properties(walk: Walk, value: Any, place: Place) -> None:
    if not isinstance(value, dict):
        walk.refuse(place.at, f"{shown(value)} is not an object of schemas")
        return
    if len(value) > _MAX_PROPERTIES:
        walk.refuse(place.at, f"more than {_MAX_PROPERTIES:,} properties in an object")
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
        if name is None:
            continue
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
    """Rewrite propertyNames with a pattern, a format or a list of names as the only allowed properties."""
    names = _string_schema(_target(walk, value), walk, place)
    rest = walk.inner(place.schema.get("additionalProperties", True), place)
    if not names:
        place.out["additionalProperties"] = rest
    elif "properties" in place.schema or "patternProperties" in place.schema:
        walk.cannot(place.at, "propertyNames together with properties or patternProperties")
    elif names.keys() == {"pattern"}:
        place.out["patternProperties"] = {names["pattern"]: rest}
        place.out["additionalProperties"] = False
    elif names.keys() == {"enum"}:
        place.out["properties"] = {name: rest for name in names["enum"] if isinstance(name, str)}
        place.out["additionalProperties"] = False
    else:
        walk.cannot(place.at, "propertyNames other than a pattern, lengths, a format or an enum cannot be enforced")


def _target(walk: Walk, schema: Any) -> Any:
    """The schema that one consisting of a reference alone leads to."""
    seen: set[str] = set()
    while isinstance(schema, dict) and schema.keys() - ANNOTATIONS == {"$ref"}:
        pointer, _ = walk.references.resolve(schema["$ref"])
        if pointer is None or pointer in seen:
            break
        seen.add(pointer)
        schema = walk.references.target(pointer)
    return schema


def _string_schema(schema: Any, walk: Walk, place: Place) -> dict[str, Any]:
    """Rewrite a schema of names: lengths as a pattern, a constant as an enum."""
    written = walk.inner(schema, place)
    if not isinstance(written, dict):
        return {"enum": []} if written is False else {}
    names = {key: item for key, item in written.items() if (key, item) != ("type", "string")}
    if len(names.get("allOf", ())) == 1 and names["allOf"][0].keys() == {"pattern"} and len(names) == 1:
        return dict(names["allOf"][0])
    if names.keys() == {"const"}:
        return {"enum": [names["const"]]}
    if names and not names.keys() - {"minLength", "maxLength"}:
        return {"pattern": f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$"}
    return names


def _required(walk: Walk, value: Any, place: Place) -> None:
    if not is_list_of_texts(value):
        walk.refuse(place.at, f"{shown(value)} is not an array of strings")
        return
    if not all(map(can_be_written, value)):
        walk.refuse(place.at, _CANNOT_BE_WRITTEN)
    require(walk, value, place)


def require(walk: Walk, names: Iterable[str], place: Place) -> None:
    """Add names to those that the rewritten schema requires."""
    required = list(dict.fromkeys([*place.out.get("required", []), *names]))
    if len(required) > _MAX_PROPERTIES:
        walk.refuse(place.at, f"more than {_MAX_PROPERTIES:,} required properties in an object")
    else:
        place.out["required"] = required


def _min_properties(walk: Walk, value: Any, place: Place) -> None:
    """Rewrite minProperties: a repeated name counts twice, so above 1 as many of the listed names are required."""
    if not count(walk, value, place.at):
        return
    required = names_required(place.schema)
    num_missing = int(value) - len(required)
    if num_missing <= 0:
        return
    if value == 1:
        place.out["minProperties"] = 1
        return
    properties = place.schema.get("properties", {})
    optional = [name for name in properties if name not in required] if isinstance(properties, dict) else []
    if walk.is_wide:
        place.out["minProperties"] = 1
    elif not 0 < math.comb(len(optional), num_missing) <= _MAX_CHOICES_OF_NAMES:
        walk.cannot(place.at, f"minProperties: above 1 it is enforced beside a few listed properties only, not {value}")
    else:
        choices = [{"required": list(names)} for names in itertools.combinations(optional, num_missing)]
        place.out.setdefault("allOf", []).append({"anyOf": choices})


def _max_properties(walk: Walk, value: Any, place: Place) -> None:
    if count(walk, value, place.at):
        place.out["maxProperties"] = int(value)


def names_required(schema: dict[str, Any]) -> set[str]:
    """Names that a schema requires in all objects."""
    required = schema.get("required", [])
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
}
