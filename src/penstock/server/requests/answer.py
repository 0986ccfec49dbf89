"""Events of a model's answer: reasoning, content and tool calls, as every chat API streams them.

The chat, responses and messages APIs share one interface: an `AnswerFormat` per request says how the model must be
prompted and constrained, and an `AnswerParser` per sample turns the sampled text into events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from penstock.contract import StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Next characters of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Next characters of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Begin of a tool call. index: number among the answer's tool calls, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Next characters of a tool call's arguments, which are JSON text."""

    index: int
    text: str


AnswerEvent: TypeAlias = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments


class AnswerParser(Protocol):
    """Incremental parser of one sample's text."""

    def push(self, text: str) -> list[AnswerEvent]:
        """Take the next characters. Characters that may begin a marker are kept until it is certain."""

    def finish(self) -> list[AnswerEvent]:
        """End of the text: events of the characters that were kept."""


class AnswerFormat(Protocol):
    """Form of the answers to one request.

    structured_outputs: constraint of the sampled text, or None. skip_special_tokens: False where the markers of tool
    calls or reasoning are special tokens, which the text must keep.
    """

    structured_outputs: StructuredOutputsParams | None
    skip_special_tokens: bool

    def parser(self, prompt_token_ids: list[int]) -> AnswerParser:
        """Parser for one more sample of the request. prompt_token_ids: tells whether the answer begins in reasoning."""

    def num_reasoning_tokens(self, prompt_token_ids: list[int], token_ids: list[int]) -> int:
        """Number of first tokens of a sample that are reasoning, markers included."""


class PlainAnswer:
    """Format of answers that are content only.

    structured_outputs: constraint of the sampled text, or None.
    """

    skip_special_tokens = True

    def __init__(self, structured_outputs: StructuredOutputsParams | None = None) -> None:
        self.structured_outputs = structured_outputs

    def parser(self, prompt_token_ids: list[int]) -> AnswerParser:
        return _PlainParser()

    def num_reasoning_tokens(self, prompt_token_ids: list[int], token_ids: list[int]) -> int:
        return 0


class _PlainParser:
    def push(self, text: str) -> list[AnswerEvent]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[AnswerEvent]:
        return []
