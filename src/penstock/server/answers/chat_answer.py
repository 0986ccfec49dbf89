"""Format of the answers to one chat request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.config.reasoning import CUSTOM, HARMONY, REASONING_PARSERS, ReasoningMarkers, reasoning_markers
from penstock.contract import StructuredOutputsParams
from penstock.errors import InvalidParameter
from penstock.server.answers.constraint import constraint
from penstock.server.answers.harmony import HARMONY as HARMONY_CALLS
from penstock.server.answers.harmony import HarmonyParser
from penstock.server.answers.reasoning import ReasoningParser
from penstock.server.answers.tool_choice import Mode, ToolChoice, read_tool_choice
from penstock.server.answers.tool_format import ToolCallFormat
from penstock.server.answers.tool_parsers import tool_call_format
from penstock.server.requests.answer import AnswerEvent, AnswerFormat, AnswerParser, ContentDelta, PlainAnswer
from penstock.structured.harmony_messages import HarmonyTokens
from penstock.structured.reasoning import ReasoningTokens, reasoning_tokens
from penstock.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _ToolAnswer:
    """Format of answers with tool calls."""

    structured_outputs: StructuredOutputsParams | None
    skip_special_tokens: bool
    make_parser: Callable[[], AnswerParser]

    def parser(self, prompt_token_ids: list[int]) -> AnswerParser:
        return self.make_parser()

    def num_reasoning_tokens(self, prompt_token_ids: list[int], token_ids: list[int]) -> int:
        return 0


class _CallsOnly:
    """Parser of answers that are constrained to calls: other text is of a call that was cut off, and is dropped."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[AnswerEvent]:
        return [event for event in self._parser.push(text) if not isinstance(event, ContentDelta)]

    def finish(self) -> list[AnswerEvent]:
        return [event for event in self._parser.finish() if not isinstance(event, ContentDelta)]


class _ReasonedAnswer:
    """Format of answers after reasoning. answer_begins: markers of `answer` that end reasoning, too."""

    def __init__(
        self, answer: AnswerFormat, markers: ReasoningMarkers, tokenizer: Tokenizer, answer_begins: tuple[str, ...]
    ) -> None:
        self.structured_outputs = answer.structured_outputs
        self.skip_special_tokens = answer.skip_special_tokens and not _any_special(
            tokenizer, (markers.start, markers.end)
        )
        self._answer = answer
        self._markers = markers
        self._tokens = _reasoning_tokens(tokenizer, markers)
        self._answer_begins = answer_begins

    def parser(self, prompt_token_ids: list[int]) -> AnswerParser:
        answer, reasons = self._answer.parser(prompt_token_ids), self._tokens.reasons_after(prompt_token_ids)
        return ReasoningParser(self._markers, answer, reasons=reasons, answer_begins=self._answer_begins)

    def num_reasoning_tokens(self, prompt_token_ids: list[int], token_ids: list[int]) -> int:
        return self._tokens.num_tokens_of(prompt_token_ids, token_ids)


class _HarmonyAnswer:
    """Format of answers of harmony messages. answer: format of the text for the user.

    choice: of tools, whose calls are messages; None if they are not, or part of the text.
    """

    skip_special_tokens = False

    def __init__(
        self, answer: AnswerFormat, tokenizer: Tokenizer, choice: ToolChoice | None, *, parallel: bool
    ) -> None:
        self.structured_outputs = answer.structured_outputs
        self._answer = answer
        self._tokens = HarmonyTokens.of(tokenizer)
        self._choice = choice
        self._parallel = parallel

    def parser(self, prompt_token_ids: list[int]) -> AnswerParser:
        parser = HarmonyParser(
            self._answer.parser(prompt_token_ids),
            takes_calls=self._choice is not None,
            parallel=self._parallel,
            opened=self._tokens.opened_header(prompt_token_ids),
        )
        return _CallsOnly(parser) if self._choice is not None and self._choice.mode is Mode.REQUIRED else parser

    def num_reasoning_tokens(self, prompt_token_ids: list[int], token_ids: list[int]) -> int:
        return self._tokens.num_reasoning_tokens(prompt_token_ids, token_ids)


def chat_answer(
    *,
    tools: Any,
    tool_choice: Any,
    parallel: bool,
    structured_outputs: StructuredOutputsParams | None,
    tool_call_parser: str | None,
    enable_auto_tool_choice: bool,
    reasoning_parser: str | None,
    reasoning_strings: tuple[str, str],
    tokenizer: Tokenizer,
) -> AnswerFormat:
    """As `answer_format`."""
    choice = read_tool_choice(tools, tool_choice)
    if choice.mode is Mode.AUTO and not enable_auto_tool_choice:
        raise InvalidParameter(
            'tool_choice="auto" needs a server that was started with --enable-auto-tool-choice and '
            "--tool-call-parser, since the chat template writes calls in a form that no parser is known to read. Start "
            'it with them, or choose "required", "none" or a function.'
        )
    parallel = parallel and not choice.is_one_call
    has_messages = reasoning_parser == HARMONY
    answer: AnswerFormat = PlainAnswer(structured_outputs)
    if choice.mode is not Mode.NONE:
        format = tool_call_format(tool_call_parser, tokenizer)
        constrained = constraint(
            format,
            choice,
            structured_outputs,
            parallel=parallel,
            follows_reasoning=reasoning_parser is not None and not has_messages,
        )
        if has_messages and format is HARMONY_CALLS:
            return _HarmonyAnswer(PlainAnswer(constrained), tokenizer, choice, parallel=parallel)
        answer = _tool_answer(format, choice, constrained, tokenizer, parallel=parallel)
    if reasoning_parser is None:
        return answer
    if has_messages:
        return _HarmonyAnswer(answer, tokenizer, None, parallel=parallel)
    markers = _reasoning_markers(reasoning_parser, reasoning_strings)
    return _ReasonedAnswer(answer, markers, tokenizer, () if choice.mode is Mode.NONE else markers.implied_ends)


def _tool_answer(
    format: ToolCallFormat,
    choice: ToolChoice,
    structured_outputs: StructuredOutputsParams | None,
    tokenizer: Tokenizer,
    *,
    parallel: bool,
) -> AnswerFormat:
    def make_parser() -> AnswerParser:
        parser = format.parser(choice.tools, parallel=parallel)
        return _CallsOnly(parser) if choice.mode is Mode.REQUIRED else parser

    return _ToolAnswer(structured_outputs, not _any_special(tokenizer, format.markers), make_parser)


def _reasoning_markers(parser: str, strings: tuple[str, str]) -> ReasoningMarkers:
    if parser != CUSTOM and parser not in REASONING_PARSERS:
        raise InvalidParameter(
            f"reasoning_parser={parser!r} is not known. Allowed: {', '.join((*REASONING_PARSERS, CUSTOM))}."
        )
    return reasoning_markers(parser, *strings)


@functools.lru_cache(maxsize=8)
def _reasoning_tokens(tokenizer: Tokenizer, markers: ReasoningMarkers) -> ReasoningTokens:
    """As `reasoning_tokens`, which encodes hundreds of texts."""
    return reasoning_tokens(tokenizer, markers)


def _any_special(tokenizer: Tokenizer, texts: Iterable[str]) -> bool:
    """Whether a text has a special token, which detokenisation skips by default."""
    return any(
        tokenizer.decode(token_ids, skip_special_tokens=True) != tokenizer.decode(token_ids, skip_special_tokens=False)
        for token_ids in (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    )
