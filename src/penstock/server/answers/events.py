"""Lists of answer events."""

from __future__ import annotations

from collections.abc import Iterable

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
