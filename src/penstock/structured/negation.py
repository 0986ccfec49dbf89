"""Complement of a schema."""

from __future__ import annotations

from typing import Any

_TYPES = ("null", "boolean", "number", "string", "array", "object")
# By keyword: its type, and the schema of the instances of that type that violate it.
_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}


def negated(schema: Any) -> Any:
    """Return the schema of exactly the instances that are invalid for this one; None if it is unknown."""
    if isinstance(schema, bool):
        return not schema
    if len(schema) > 1:
        return _any_of([negated({name: value}) for name, value in schema.items()])
    if not schema:
        return False
    ((name, value),) = schema.items()
    if name == "type":
        return _not_of_types(value)
    if name == "const":
        return _not_of_constant(value)
    if name in _BOUNDS:
        return _not_of_bound(name, value)
    if name == "required":
        return _any_of([{"type": "object", "properties": {missing: False}} for missing in value])
    if name == "properties":
        return _any_of([_with_property(key, negated(item)) for key, item in value.items()])
    if name == "allOf":
        return _any_of([negated(branch) for branch in value])
    if name == "anyOf":
        branches = [negated(branch) for branch in value]
        return None if None in branches else {"allOf": branches}
    return None


def _any_of(branches: list[Any]) -> Any:
    """Union of branches; None if one of them is unknown."""
    if None in branches:
        return None
    return {"anyOf": branches} if branches else False


def _not_of_types(types: str | list[str]) -> Any:
    unwanted = {types} if isinstance(types, str) else set(types)
    if "integer" in unwanted:
        # Types cannot tell a number that is not an integer.
        return None
    rest = [name for name in _TYPES if name not in unwanted]
    return {"type": rest} if rest else False


def _not_of_constant(value: Any) -> Any:
    if value is None:
        return _not_of_types("null")
    if isinstance(value, bool):
        return {"anyOf": [_not_of_types("boolean"), {"const": not value}]}
    if isinstance(value, (int, float)):
        rest = [{"type": "number", "exclusiveMaximum": value}, {"type": "number", "exclusiveMinimum": value}]
        return {"anyOf": [_not_of_types("number"), *rest]}
    return None


def _not_of_bound(name: str, value: float) -> Any:
    kind, opposite, step = _BOUNDS[name]
    if value + step < 0 and step:
        return False
    return {"type": kind, opposite: value + step}


def _with_property(name: str, schema: Any) -> Any:
    return None if schema is None else {"type": "object", "required": [name], "properties": {name: schema}}
