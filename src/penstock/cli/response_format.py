"""The form of an answer as OpenAI's API asks for it: `response_format`."""

from __future__ import annotations

from typing import Any

from penstock.errors import InvalidParameter

_NAME = "response_format"
# By type: the fields beside it, all of which are needed. None: those of a structural tag, which are checked with it.
_FIELDS: dict[str, tuple[str, ...] | None] = {
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
    "grammar": ("grammar",),
    "structural_tag": None,
}
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def take_response_format(body: dict[str, Any]) -> dict[str, Any]:
    """Take `response_format` out of a body, as parameters of ours; none if it has none.

    The type "text" asks for no form, whatever the command line says. Raises InvalidParameter.
    """
    if _NAME not in body:
        return {}
    given = body.pop(_NAME)
    if "structured_outputs" in body:
        raise InvalidParameter(f"There are {_NAME} and structured_outputs. Give one of them.")
    return {"structured_outputs": _constraint(given)}


def _constraint(given: Any) -> dict[str, Any] | None:
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        types = ", ".join(map(repr, _FIELDS))
        raise InvalidParameter(f"{_NAME}={given!r} is not available. Allowed: an object whose type is one of {types}.")
    fields = _FIELDS[kind]
    if fields is not None:
        _check_fields(_NAME, given, ("type", *fields), fields)
    if kind == "json_schema":
        schema = given["json_schema"]
        _check_fields(f"{_NAME}.json_schema", schema, _SCHEMA_FIELDS, ("schema",))
        return {"json": schema["schema"]}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "grammar":
        return {"grammar": given["grammar"]}
    return {"structural_tag": given} if kind == "structural_tag" else None


def _check_fields(name: str, given: Any, allowed: tuple[str, ...], needed: tuple[str, ...]) -> None:
    if not isinstance(given, dict):
        raise InvalidParameter(f"{name}={given!r} is not valid. Allowed: an object with {', '.join(allowed)}.")
    for field in given:
        if field not in allowed:
            raise InvalidParameter(f"{name} has a field {field!r}. Allowed: {', '.join(allowed)}.")
    for field in needed:
        if given.get(field) is None:
            raise InvalidParameter(f"{name}.{field} is missing. Give it, beside {', '.join(allowed)}.")
