"""Items of a response's input, as messages of a chat request."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.server.errors import ApiError
from penstock.server.fields import not_valid, object_of, string_of, texts_of

_ROLES = ("user", "system", "developer", "assistant")
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_TEXTS = {"reasoning_text": "text", "summary_text": "text"}
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def new_id(kind: str) -> str:
    """Id of a new item of this type."""
    return f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}"


def input_items(given: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Items of a request's `input`, each with a type and an id. Raises ApiError."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, f"input[{index}]") for index, item in enumerate(given)]


@dataclass(slots=True)
class Conversation:
    """Messages of a chat request. paths: of the item that a message begins with, by the message's own path."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)

    def add_instructions(self, text: str) -> None:
        self._add({"role": "system", "content": text}, "instructions")

    def add(self, items: Sequence[Mapping[str, Any]], path: Callable[[int], str]) -> None:
        """Add items. path: of an item by its number, for errors. Raises ApiError."""
        for index, item in enumerate(items):
            self._add_item(item, path(index))

    def _add_item(self, item: Mapping[str, Any], path: str) -> None:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                text = "".join(texts_of(item.get("content"), f"{path}.content", _TEXTS))
                self._add_to_answer("content", text, path)
            case "message":
                texts = texts_of(item.get("content"), f"{path}.content", _TEXTS)
                content = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
                self._add({"role": item["role"], "content": content}, path)
            case "reasoning":
                self._add_to_answer("reasoning", _reasoning_text(item, path), path)
            case "function_call":
                self._add_call(item, path)
            case "function_call_output":
                text = "".join(texts_of(item.get("output"), f"{path}.output", _TEXTS))
                call_id = string_of(item, "call_id", path)
                self._add({"role": "tool", "tool_call_id": call_id, "content": text}, path)

    def _add(self, message: dict[str, Any], path: str) -> None:
        self.paths[f"messages[{len(self.messages)}]"] = path
        self.messages.append(message)

    def _add_call(self, item: Mapping[str, Any], path: str) -> None:
        function = {"name": string_of(item, "name", path), "arguments": string_of(item, "arguments", path)}
        call = {"id": string_of(item, "call_id", path), "type": "function", "function": function}
        self._answer(path).setdefault("tool_calls", []).append(call)

    def _add_to_answer(self, name: str, text: str, path: str) -> None:
        """Add the content or reasoning of an answer; reasoning begins the next message of the model."""
        last = self.messages[-1] if self.messages else {}
        begins = name in last or (name == "reasoning" and last.keys() & {"content", "tool_calls"})
        message = self._answer(path, begins=bool(begins))
        message[name] = text

    def _answer(self, path: str, *, begins: bool = False) -> dict[str, Any]:
        """The model's message at the end of the conversation: a new one, if there is none, or if it `begins`."""
        if begins or not self.messages or self.messages[-1]["role"] != "assistant":
            self._add({"role": "assistant"}, path)
        return self.messages[-1]


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
