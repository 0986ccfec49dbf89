"""Lists of answer events, and the base of the parsers that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.server.answers.markers import Markers
from penstock.server.requests.answer import AnswerEvent, ContentDelta, ReasoningDelta, ToolCallArguments


def merged(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """Join neighbouring events of one kind."""
    found: list[AnswerEvent] = []
    for event in events:
        joined = _joined(found[-1], event) if found else None
        if joined is None:
            found.append(event)
        else:
            found[-1] = joined
    return found


def _joined(first: AnswerEvent, second: AnswerEvent) -> AnswerEvent | None:
    match first, second:
        case ContentDelta(text), ContentDelta(more):
            return ContentDelta(text + more)
        case ReasoningDelta(text), ReasoningDelta(more):
            return ReasoningDelta(text + more)
        case ToolCallArguments(index, text), ToolCallArguments(other, more) if index == other:
            return ToolCallArguments(index, text + more)
    return None


class StateParser:
    """Base of parsers of text that comes in pieces.

    state: the first state, which takes what it can from the pending text, and returns whether it went on.
    """

    def __init__(self, state: Callable[[], bool], pending: str = "") -> None:
        self._state = state
        self._pending = pending
        self._events: list[AnswerEvent] = []
        self._is_at_end = False

    def push(self, text: str) -> list[AnswerEvent]:
        self._pending += text
        while self._pending and self._state():
            pass
        return self._take_events()

    def _take_events(self) -> list[AnswerEvent]:
        events, self._events = merged(self._events), []
        return events

    def _take_free(self, markers: Markers, *, keeps_blanks: bool = False) -> str:
        """Take the pending text, but for an end that may begin a marker. keeps_blanks: and whitespace before that."""
        kept = 0 if self._is_at_end else markers.num_kept(self._pending)
        free = self._pending[: len(self._pending) - kept]
        if keeps_blanks and not self._is_at_end:
            free = free.rstrip()
        self._pending = self._pending[len(free) :]
        return free
