"""Readable messages of invalid request bodies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from penstock.config import vllm
from penstock.config.checks import did_you_mean
from penstock.contract.param_checks import shown
from penstock.errors import InvalidRequest
from penstock.server.http.errors import ApiError
from penstock.server.protocol.base import FIELD_ERROR

_SHOWN_KINDS = 4


def validation_error(errors: Sequence[Any], body: Any, fields: Collection[str]) -> ApiError:
    """Response to an invalid body.

    errors: of pydantic. body: JSON data, or bytes if it was no JSON. fields: allowed names at the top level.
    """
    first = errors[0]
    kind, location = first["type"], tuple(first["loc"])
    if kind == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['ctx']['error']} at position {location[-1]}.")
    if location[:1] != ("body",):
        return ApiError(400, f"{_path(location[1:])}: {first['msg']}", param=_path(location[1:]) or None)
    if not isinstance(body, dict):
        return ApiError(400, _whole_body_message(body))
    if kind == FIELD_ERROR:
        return ApiError(400, first["ctx"]["message"], param=first["ctx"]["param"])
    places = [_place(tuple(error["loc"])[1:], body, error["type"]) for error in errors]
    # Branches of a union fail at one place, or at deeper ones where the value has their type.
    deepest = max((place for place in places if place[:1] == places[0][:1]), key=len)
    param = _path(deepest)
    same = [error for error, place in zip(errors, places, strict=True) if place == deepest]
    return ApiError(400, _message(same, param, deepest, body, fields), param=param or None)


def _whole_body_message(body: Any) -> str:
    if body is None or body == b"":
        return "The body is empty. Allowed: a JSON object."
    if isinstance(body, bytes):
        return "The body is not read as JSON. Send the header Content-Type: application/json."
    return f"The body is {shown(body)}. Allowed: a JSON object."


def _message(
    errors: Sequence[Any], param: str, place: Sequence[str | int], body: dict[str, Any], fields: Collection[str]
) -> str:
    kind = errors[0]["type"]
    if kind == "missing":
        return f"{param} is missing."
    if kind == "extra_forbidden":
        if len(place) == 1:
            return _unknown_field(param, body[param], fields)
        return f"There is no field {param}."
    texts = dict.fromkeys(error["msg"].removeprefix("Input should be ") for error in errors[:_SHOWN_KINDS])
    return f"{param or 'The name of a field'}={shown(errors[0]['input'])} is not valid. Allowed: {' or '.join(texts)}."


def _unknown_field(name: str, value: Any, fields: Collection[str]) -> str:
    try:
        ours = vllm.parameters_as_ours({name: value}, ())
    except InvalidRequest as error:
        return str(error)
    renamed = next((own for own in ours if own in fields), None)
    advice = did_you_mean(name, fields, most=1) if renamed is None else f" Give {renamed}."
    return f"There is no field {name}.{advice}"


def _place(location: Sequence[str | int], body: Any, kind: str) -> tuple[str | int, ...]:
    """Location within the body: pydantic's, without the names of a union's branches."""
    place: list[str | int] = []
    for number, key in enumerate(location, start=1):
        if isinstance(body, dict) and isinstance(key, str) and key in body:
            place.append(key)
            body = body[key]
        elif isinstance(body, list) and isinstance(key, int):
            place.append(key)
            body = body[key] if key < len(body) else None
        elif kind == "missing" and number == len(location):
            place.append(key)
    return tuple(place)


def _path(location: Sequence[str | int]) -> str:
    """Location as text, such as "messages[0].content"."""
    text = ""
    for key in location:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text
