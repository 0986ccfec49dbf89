"""Items of a response's input, as messages of a chat request."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.server.http.errors import ApiError
from penstock.server.http.fields import not_valid, object_of, parts_of, string_of, texts_of
from penstock.server.requests.chat_messages import SYSTEM_ROLES, ChatMessages, content_of, image_part

_ROLES = ("user", "system", "developer", "assistant")
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_TEXTS = {"reasoning_text": "text", "summary_text": "text"}
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def _image(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    if part.get("file_id") is not None:
        raise ApiError(400, f"{path}.file_id names a stored file. Give image_url.", param=f"{path}.file_id")
    return image_part(string_of(part, "image_url", path), part.get("detail"))


def _audio(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    audio = object_of(part.get("input_audio"), f"{path}.input_audio")
    fields = {name: string_of(audio, name, f"{path}.input_audio") for name in ("data", "format")}
    return {"type": "input_audio", "input_audio": fields}


_MEDIA = {"input_image": _image, "input_audio": _audio}


def new_id(kind: str) -> str:
    """Id of a new item of this type."""
    return f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}"


def input_items(given: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Items of a request's `input`, each with a type and an id. Raises ApiError."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, f"input[{index}]") for index, item in enumerate(given)]


def add_items(chat: ChatMessages, items: Sequence[Mapping[str, Any]], path: Callable[[int], str]) -> None:
    """Add items to a conversation. path: of an item by its number, for errors. Raises ApiError."""
    for index, item in enumerate(items):
        _add_item(chat, item, path(index))


def _add_item(chat: ChatMessages, item: Mapping[str, Any], path: str) -> None:
    match item["type"]:
        case "message" if item["role"] == "assistant":
            chat.add_to_answer("content", "".join(texts_of(item.get("content"), f"{path}.content", _TEXTS)), path)
        case "message":
            if item["role"] in SYSTEM_ROLES:
                chat.add_system(item["role"], texts_of(item.get("content"), f"{path}.content", _TEXTS), path)
            else:
                parts = parts_of(item.get("content"), f"{path}.content", _TEXTS, _MEDIA)
                chat.add({"role": item["role"], "content": content_of(parts)}, path)
        case "reasoning":
            chat.add_to_answer("reasoning", _reasoning_text(item, path), path)
        case "function_call" if item.get("status") == "incomplete":
            # Its arguments were cut off, and it has no result.
            return
        case "function_call":
            name, arguments = string_of(item, "name", path), string_of(item, "arguments", path)
            chat.add_call(string_of(item, "call_id", path), name, arguments, path)
        case "function_call_output":
            parts = parts_of(item.get("output"), f"{path}.output", _TEXTS, _MEDIA)
            chat.add_result(string_of(item, "call_id", path), parts, path)


def _item(given: Any, path: str) -> dict[str, Any]:
    item = dict(object_of(given, path))
    kind = item.setdefault("type", "message") if "role" in item else item.get("type")
    if kind == "item_reference":
        message = f"{path} refers to a stored item. Give the item itself, or previous_response_id."
        raise ApiError(400, message, param=path)
    if kind not in _ID_PREFIXES:
        raise not_valid(f"{path}.type", kind, ", ".join(_ID_PREFIXES))
    if kind == "message" and item.get("role") not in _ROLES:
        raise not_valid(f"{path}.role", item.get("role"), ", ".join(_ROLES))
    if kind == "message" and isinstance(item.get("content"), str):
        part = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
        item["content"] = [part | {"text": item["content"]}]
    if not isinstance(item.get("id"), str):
        item["id"] = new_id(kind)
    return item


def _reasoning_text(item: Mapping[str, Any], path: str) -> str:
    """Text of reasoning: its content, or its summary."""
    name = "content" if item.get("content") else "summary"
    return "\n".join(texts_of(item.get(name) or [], f"{path}.{name}", _REASONING_TEXTS))
