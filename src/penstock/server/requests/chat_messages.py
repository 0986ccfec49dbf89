"""Messages of a chat request, from the conversations of other APIs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SYSTEM_ROLES = ("system", "developer")


def content_of(parts: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Content of a message: a text, or its parts. parts: texts, and media as parts of chat messages."""
    if not parts:
        return ""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def image_part(url: str, detail: str | None = None) -> dict[str, Any]:
    """Part of a content with an image. url: also of data. detail: as OpenAI's."""
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    return {"type": "image_url", "image_url": image}


@dataclass(slots=True)
class ChatMessages:
    """Messages of a chat request. paths: the client's path of what a message begins with, by the message's own path."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)
    _system_texts: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], path: str) -> None:
        self.paths[f"messages[{len(self.messages)}]"] = path
        self.messages.append(message)

    def add_system(self, role: str, texts: Sequence[str], path: str) -> None:
        """Add the instructions of a system or developer message. Instructions at the start are one message, with a part
        each, since many templates take no second one.
        """
        if len(self.messages) == 1 and self.messages[0]["role"] in SYSTEM_ROLES:
            self._system_texts += texts
            self.messages[0]["content"] = content_of(self._system_texts)
            return
        if not self.messages:
            self._system_texts = list(texts)
        self.add({"role": role, "content": content_of(texts)}, path)

    def add_result(self, call_id: str, parts: Sequence[str | dict[str, Any]], path: str) -> None:
        """Add the result of a tool."""
        self.add({"role": "tool", "tool_call_id": call_id, "content": content_of(parts)}, path)

    def add_to_answer(self, name: str, text: str, path: str) -> None:
        """Add the content or reasoning of an answer to its message, or begin the next one; reasoning comes first."""
        last = self._answer(path)
        if name in last or (name == "reasoning" and last.keys() & {"content", "tool_calls"}):
            self.add({"role": "assistant"}, path)
        self.messages[-1][name] = text

    def add_call(self, id: str, name: str, arguments: str, path: str) -> None:
        """Add a tool call to an answer. arguments: JSON text."""
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._answer(path).setdefault("tool_calls", []).append(call)

    def _answer(self, path: str) -> dict[str, Any]:
        """The model's message at the end of the conversation: a new one, if there is none."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add({"role": "assistant"}, path)
        return self.messages[-1]
