"""Answers in the formats of tool parsers, and their events by simple means."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import HealthCheck, settings

from penstock.server.answers.tool_format import CallableTool
from penstock.server.requests.answer import (
    AnswerEvent,
    AnswerParser,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)

# Of property tests, which may run on a loaded machine.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Answer(NamedTuple):
    """Events joined. calls: names and arguments."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def joined(events: Iterable[AnswerEvent]) -> Answer:
    reasoning, content = "", ""
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning += text
            case ContentDelta(text):
                content += text
            case ToolCallStart(index, _, name):
                assert index == len(calls), "calls are numbered in their order"
                calls.append((name, ""))
            case ToolCallArguments(index, text):
                assert index == len(calls) - 1, "arguments belong to the last call"
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return Answer(reasoning, content, calls)


def parsed(parser: AnswerParser, pieces: Iterable[str]) -> Answer:
    return joined([*(event for piece in pieces for event in parser.push(piece)), *parser.finish()])


def split(text: str, cuts: Iterable[int]) -> list[str]:
    """Pieces of a text between positions."""
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]


def tools(*names: str) -> list[CallableTool]:
    return [CallableTool(name, {"type": "object"}) for name in names]


def function(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Tool as a client of OpenAI's chat API sends it."""
    described = {"name": name, **({} if parameters is None else {"parameters": parameters}), **fields}
    return {"type": "function", "function": described}
