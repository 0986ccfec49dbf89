"""Scripted answer with reasoning, text and calls, which the demo model is constrained to."""

from __future__ import annotations

import re

from penstock.contract import StructuredOutputsParams
from penstock.server.requests.answer import (
    AnswerEvent,
    AnswerParser,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)

NUM_REASONING_TOKENS = 3
TEXT = 'hm <f>{"a":1}</f>, <g>{}</g> done'


class MarkedAnswer:
    """Answer `hm <f>{...}</f>, <g>{...}</g> done`: reasoning up to the first space, calls in marks, and content."""

    skip_special_tokens = True

    def __init__(self, text: str) -> None:
        self.structured_outputs = StructuredOutputsParams(choice=(text,))

    def parser(self, prompt_token_ids: list[int]) -> AnswerParser:
        assert prompt_token_ids
        return _MarkedParser()

    def num_reasoning_tokens(self, prompt_token_ids: list[int], token_ids: list[int]) -> int:
        return NUM_REASONING_TOKENS


class _MarkedParser:
    def __init__(self) -> None:
        self._text = ""
        self._call: str | None = None
        self._num_calls = 0
        self._reasons = True

    def push(self, text: str) -> list[AnswerEvent]:
        self._text += text
        events: list[AnswerEvent] = []
        while (match := re.match(r"</?[fg]>|[^<]", self._text)) is not None:
            self._text = self._text[match.end() :]
            events.append(self._event(match[0]))
        return [event for event in events if not (isinstance(event, ToolCallArguments) and not event.text)]

    def finish(self) -> list[AnswerEvent]:
        return [ContentDelta(self._text)] if self._text else []

    def _event(self, piece: str) -> AnswerEvent:
        if piece.startswith("</"):
            self._call = None
            return ToolCallArguments(self._num_calls - 1, "")
        if piece.startswith("<"):
            self._call, self._num_calls = piece[1], self._num_calls + 1
            return ToolCallStart(self._num_calls - 1, f"call-{self._num_calls}", piece[1])
        if self._call is not None:
            return ToolCallArguments(self._num_calls - 1, piece)
        if self._reasons:
            self._reasons = piece != " "
            return ReasoningDelta(piece)
        return ContentDelta(piece)
