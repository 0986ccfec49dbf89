"""Parts of one sample's answer in their order: reasoning, texts and tool calls, for APIs whose answers are lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.server.requests.answer import (
    AnswerEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)


@dataclass(slots=True)
class Part:
    """Part of an answer. index: number in the answer. text: so far. is_done: whether the answer went on after it."""

    index: int
    text: str = ""
    is_done: bool = False


@dataclass(slots=True)
class ReasoningPart(Part):
    """Reasoning of the model."""


@dataclass(slots=True)
class TextPart(Part):
    """Content of the answer."""


@dataclass(slots=True)
class CallPart(Part):
    """Tool call; its text are the arguments, which are JSON. call_id: which the tool's result names."""

    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class PartStart:
    """Begin of a part."""

    part: Part


@dataclass(frozen=True, slots=True)
class PartDelta:
    """Next characters of a part."""

    part: Part
    text: str


@dataclass(frozen=True, slots=True)
class PartEnd:
    """End of a part."""

    part: Part


PartEvent: TypeAlias = PartStart | PartDelta | PartEnd


class AnswerParts:
    """Parts of an answer, from its events. parts: so far; each ends when the next begins."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def push(self, events: Iterable[AnswerEvent]) -> list[PartEvent]:
        """Take the next events of the answer."""
        return [made for event in events for made in self._push(event)]

    def begin_text(self) -> list[PartEvent]:
        """Begin an empty text."""
        return self._start(TextPart(len(self.parts)))

    def finish(self, *, is_cut_off: bool) -> list[PartEvent]:
        """End the answer. is_cut_off: whether its last part is not complete."""
        last = self.parts[-1] if self.parts else None
        if last is None or last.is_done:
            return []
        last.is_done = not is_cut_off
        return [PartEnd(last)]

    def _push(self, event: AnswerEvent) -> list[PartEvent]:
        match event:
            case ReasoningDelta(text):
                return self._add_text(ReasoningPart, text)
            case ContentDelta(text):
                return self._add_text(TextPart, text)
            case ToolCallStart(_, id, name):
                return self._start(CallPart(len(self.parts), call_id=id, name=name))
            case ToolCallArguments(index, text):
                return [self._add(self._calls()[index], text)]

    def _add_text(self, kind: type[Part], text: str) -> list[PartEvent]:
        last = self.parts[-1] if self.parts else None
        if type(last) is kind and last is not None and not last.is_done:
            return [self._add(last, text)]
        part = kind(len(self.parts))
        return [*self._start(part), self._add(part, text)]

    def _start(self, part: Part) -> list[PartEvent]:
        ended = self.finish(is_cut_off=False)
        self.parts.append(part)
        return [*ended, PartStart(part)]

    def _add(self, part: Part, text: str) -> PartEvent:
        part.text += text
        return PartDelta(part, text)

    def _calls(self) -> list[CallPart]:
        return [part for part in self.parts if isinstance(part, CallPart)]
