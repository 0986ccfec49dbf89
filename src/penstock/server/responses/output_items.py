"""Output items of a response, and the events of a stream that has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.server.requests.answer_parts import (
    AnswerParts,
    CallPart,
    Part,
    PartDelta,
    PartEnd,
    PartEvent,
    PartStart,
    ReasoningPart,
    TextPart,
)
from penstock.server.responses.items import new_id

_TYPES: dict[type[Part], str] = {ReasoningPart: "reasoning", TextPart: "message", CallPart: "function_call"}
# Names of the events of a part's text.
_DELTAS: dict[type[Part], str] = {
    ReasoningPart: "reasoning_text",
    TextPart: "output_text",
    CallPart: "function_call_arguments",
}


class OutputItems:
    """Items of an answer, and their events: names with data."""

    def __init__(self) -> None:
        self._parts = AnswerParts()
        self._ids: list[str] = []
        # Log-probabilities of texts, by the part's index; those that no text has had yet.
        self._logprobs: dict[int, list[Any]] = {}
        self._pending_logprobs: list[Any] = []

    def push(self, events: list[Any], logprobs: list[Any]) -> list[tuple[str, dict[str, Any]]]:
        """Take the next events of the answer. Log-probabilities go to the next characters of a text."""
        self._pending_logprobs += logprobs
        return [named for made in self._parts.push(events) for named in self._events(made)]

    def finish(self, *, is_cut_off: bool) -> list[tuple[str, dict[str, Any]]]:
        """End the answer. An answer without parts gets an empty text."""
        made: list[PartEvent] = self._parts.begin_text() if not self._parts.parts else []
        made += self._parts.finish(is_cut_off=is_cut_off)
        return [named for one in made for named in self._events(one)]

    def whole(self) -> list[dict[str, Any]]:
        """The items so far, after all events."""
        return [self._item(part) for part in self._parts.parts]

    def _events(self, made: PartEvent) -> Iterator[tuple[str, dict[str, Any]]]:
        part = made.part
        where = {"item_id": self._id(part), "output_index": part.index}
        is_call = isinstance(part, CallPart)
        in_content = where if is_call else {**where, "content_index": 0}
        name = f"response.{_DELTAS[type(part)]}"
        match made:
            case PartStart():
                item = self._item(part, is_new=True)
                yield "response.output_item.added", {"output_index": part.index, "item": item}
                if not is_call:
                    yield "response.content_part.added", {**in_content, "part": self._content(part, "", [])}
            case PartDelta(_, text):
                yield f"{name}.delta", {**in_content, "delta": text, **self._delta_logprobs(part)}
            case PartEnd():
                self._take_logprobs(part)
                content = self._content(part, part.text, self._logprobs.get(part.index, []))
                yield f"{name}.done", {**in_content, **_shown_at_end(content)}
                if not is_call:
                    yield "response.content_part.done", {**in_content, "part": content}
                yield "response.output_item.done", {"output_index": part.index, "item": self._item(part)}

    def _delta_logprobs(self, part: Part) -> dict[str, Any]:
        return {"logprobs": self._take_logprobs(part)} if isinstance(part, TextPart) else {}

    def _take_logprobs(self, part: Part) -> list[Any]:
        """Give a text the log-probabilities that no text has had yet."""
        if not isinstance(part, TextPart):
            return []
        taken, self._pending_logprobs = self._pending_logprobs, []
        self._logprobs.setdefault(part.index, []).extend(taken)
        return taken

    def _id(self, part: Part) -> str:
        while len(self._ids) <= part.index:
            self._ids.append(new_id(_TYPES[type(part)]))
        return self._ids[part.index]

    def _item(self, part: Part, *, is_new: bool = False) -> dict[str, Any]:
        status = "in_progress" if is_new else "completed" if part.is_done else "incomplete"
        item: dict[str, Any] = {"id": self._id(part), "type": _TYPES[type(part)], "status": status}
        if isinstance(part, CallPart):
            arguments = "" if is_new else part.text
            return item | {"call_id": part.call_id, "name": part.name, "arguments": arguments}
        content = [] if is_new else [self._content(part, part.text, self._logprobs.get(part.index, []))]
        if isinstance(part, ReasoningPart):
            return item | {"summary": [], "content": content}
        return item | {"role": "assistant", "content": content}

    def _content(self, part: Part, text: str, logprobs: list[Any]) -> dict[str, Any]:
        match part:
            case CallPart():
                return {"name": part.name, "arguments": text}
            case ReasoningPart():
                return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _shown_at_end(content: dict[str, Any]) -> dict[str, Any]:
    """Fields of a content that the event of its end has."""
    return {key: value for key, value in content.items() if key not in ("type", "annotations")}
