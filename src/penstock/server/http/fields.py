"""Checked access to JSON objects of requests, such as the items of a conversation, which have many forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.contract.param_checks import shown
from penstock.server.http.errors import ApiError


def not_valid(path: str, value: Any, allowed: str) -> ApiError:
    """Error of a value. path: as the client wrote it, such as "input[2].content"; allowed: for its text."""
    return ApiError(400, f"{path}={shown(value)} is not valid. Allowed: {allowed}.", param=path)


def object_of(value: Any, path: str) -> Mapping[str, Any]:
    """The value, if it is an object. Raises ApiError."""
    if not isinstance(value, Mapping):
        raise not_valid(path, value, "an object")
    return value


def string_of(given: Mapping[str, Any], name: str, path: str) -> str:
    """Field of an object that is a string. path: of the object. Raises ApiError."""
    value = given.get(name)
    if value is None:
        raise ApiError(400, f"{path}.{name} is missing.", param=f"{path}.{name}")
    if not isinstance(value, str):
        raise not_valid(f"{path}.{name}", value, "a string")
    return value


def texts_of(value: Any, path: str, kinds: Mapping[str, str]) -> list[str]:
    """Texts of a content: a string, or a list of parts. Raises ApiError for parts that are no text.

    kinds: types of parts, with the name of the field that has their text.
    """
    return [part for part in parts_of(value, path, kinds, {}) if isinstance(part, str)]


def parts_of(
    value: Any,
    path: str,
    kinds: Mapping[str, str],
    media: Mapping[str, Callable[[Mapping[str, Any], str], dict[str, Any]]],
) -> list[str | dict[str, Any]]:
    """Texts and media of a content: a string, or a list of parts. Raises ApiError for other parts.

    kinds: as of `texts_of`. media: by type, the part of a chat message that a part at a path is.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise not_valid(path, value, "a string, or a list of parts")
    parts: list[str | dict[str, Any]] = []
    for index, item in enumerate(value):
        at = f"{path}[{index}]"
        part = object_of(item, at)
        kind = part.get("type")
        if isinstance(kind, str) and kind in media:
            parts.append(media[kind](part, at))
        elif isinstance(kind, str) and kind in kinds:
            parts.append(string_of(part, kinds[kind], at))
        else:
            raise not_valid(f"{at}.type", kind, ", ".join([*kinds, *media]))
    return parts
