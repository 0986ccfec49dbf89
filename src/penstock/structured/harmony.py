"""Constraints of answers in the harmony format: of the messages to the user and of the calls, behind any reasoning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.contract import StructuredOutputsParams
from penstock.structured import structural_tag as tags
from penstock.structured.backend import CompiledGrammar, GrammarBackend, Matcher
from penstock.structured.constraint_check import format_of
from penstock.structured.harmony_messages import (
    ANALYSIS,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    FINAL,
    FUNCTIONS,
    MESSAGE,
    ROLE,
    HarmonyTokens,
    Kind,
    read_header,
)

Format = dict[str, Any]


class HarmonyBackend:
    """Grammar backend whose constraints begin with the text of the message that they concern.

    Headers follow the format, for functions that the constraint allows. Messages of analysis are free, and do not end
    the output. A tag that begins with the header of a call constrains that call, however the model writes its header;
    the whole constraint is for the final message. eos_token_ids: not allowed in headers and free text.
    """

    def __init__(
        self, backend: GrammarBackend, tokens: HarmonyTokens, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._backend = backend
        self._tokens = tokens
        markers = (tokens.channel, tokens.constrain, tokens.message, tokens.return_, tokens.call)
        self._blocked = frozenset((*eos_token_ids, *markers))
        self._between_words = _words([tokens.start], vocab_size)
        self._free_words = _words(set(range(vocab_size)) - self._blocked, vocab_size)

    def compile(self, params: StructuredOutputsParams) -> HarmonyGrammar:
        content = self._backend.compile(params)
        format = None if params.structural_tag is None else format_of(params)
        calls = {
            read_header(tag.begin).function: begin
            for tag in _call_tags(format)
            if content.start().accept(begin := self._tokens.encode(tag.begin)) == len(begin)
        }
        header = _header_format(list(calls), has_comments=isinstance(format, tags.TriggeredTags))
        return HarmonyGrammar(
            content,
            self._compiled(header),
            self._compiled(_text(f"{ROLE}{CHANNEL}{FINAL}{MESSAGE}")),
            calls,
            self._tokens,
            self._blocked,
            self._between_words,
            self._free_words,
        )

    def _compiled(self, format: Format) -> CompiledGrammar:
        tag: Any = {"format": format}
        return self._backend.compile(StructuredOutputsParams(structural_tag=tag))


@dataclass(frozen=True, slots=True)
class HarmonyGrammar:
    """Compiled constraint of harmony messages.

    content: the constraint, of which a call's part begins with the tokens that `calls` has for its function.
    header: of a message behind <|start|>. final_header: of the final message alone.
    blocked: tokens that end no message, and may not come in free text.
    """

    content: CompiledGrammar
    header: CompiledGrammar
    final_header: CompiledGrammar
    calls: Mapping[str, Sequence[int]]
    tokens: HarmonyTokens
    blocked: frozenset[int]
    between_words: np.ndarray
    free_words: np.ndarray

    def start(self, prompt_token_ids: Sequence[int] = ()) -> HarmonyMatcher:
        return HarmonyMatcher(self, self.tokens.opened(prompt_token_ids))


@dataclass(slots=True)
class _Part:
    """Part of an output from one position on: a header, free text, constrained text, or what follows an end.

    matcher: of a header or of constrained text; it has accepted `num_accepted` of the output's tokens. known: tokens of
    a header that are in the prompt.
    """

    begin: int
    matcher: Matcher | None = None
    is_header: bool = False
    is_text: bool = False
    num_accepted: int = 0
    known: tuple[int, ...] = ()


class HarmonyMatcher:
    """Matcher of an output's messages. opened: tokens of the message that the prompt leaves open, from <|start|> on.

    All state follows from these and the output, so that draft tokens can be rolled back. Analysis may also end without
    <|end|>, by the header of the final message alone, which a thinking budget forces.
    """

    def __init__(self, grammar: HarmonyGrammar, opened: Sequence[int]) -> None:
        self._grammar = grammar
        self._tokens = grammar.tokens
        self._output: list[int] = []
        self._parts = [self._first(tuple(opened))]

    def _first(self, opened: tuple[int, ...]) -> _Part:
        """Part with which the output begins. A prompt that opens no message has begun the model's."""
        if self._tokens.message in opened:
            return self._message(opened[: opened.index(self._tokens.message)])
        for known in (opened[1:], tuple(self._tokens.encode(ROLE))):
            matcher = self._grammar.header.start()
            if matcher.accept(known) == len(known) > 0:
                return _Part(0, matcher, is_header=True, known=known)
        return _Part(0, self._grammar.header.start(), is_header=True)

    def _message(self, header: tuple[int, ...]) -> _Part:
        """Text behind a header."""
        read = read_header(self._tokens.decode(header))
        begin = len(self._output)
        if read.kind is Kind.REASONING or (read.channel == COMMENTARY and read.kind is Kind.CONTENT):
            return _Part(begin, is_text=True)
        matcher = self._grammar.content.start()
        if read.function in self._grammar.calls:
            matcher.accept(self._grammar.calls[read.function])
        return _Part(begin, matcher)

    def accept(self, token_ids: Sequence[int]) -> int:
        for num_accepted, token_id in enumerate(token_ids):
            if not self._accept_one(token_id):
                return num_accepted
        return len(token_ids)

    def _accept_one(self, token_id: int) -> bool:
        part, tokens = self._parts[-1], self._tokens
        begins_header = token_id == tokens.start and part.matcher is None
        if part.matcher is not None and not begins_header:
            if part.matcher.accept([token_id]) != 1:
                return False
            part.num_accepted += 1
        elif not begins_header and (not part.is_text or token_id in self._grammar.blocked):
            return False
        self._output.append(token_id)
        if begins_header:
            header = self._grammar.final_header if part.is_text else self._grammar.header
            self._parts.append(_Part(len(self._output), header.start(), is_header=True))
        elif part.is_header and token_id == tokens.message:
            self._parts.append(self._message((*part.known, *self._output[part.begin : -1])))
        elif part.is_text and token_id == tokens.end:
            self._parts.append(_Part(len(self._output)))
        return True

    def rollback(self, num_tokens: int) -> None:
        num_left = len(self._output) - num_tokens
        while self._parts[-1].begin > num_left:
            self._parts.pop()
        part = self._parts[-1]
        num_undone = part.num_accepted - min(part.num_accepted, num_left - part.begin)
        if part.matcher is not None and num_undone:
            part.matcher.rollback(num_undone)
            part.num_accepted -= num_undone
        del self._output[num_left:]

    def fill(self, words: np.ndarray) -> None:
        part = self._parts[-1]
        if part.matcher is None:
            words[:] = self._grammar.free_words if part.is_text else self._grammar.between_words
            return
        part.matcher.fill(words)

    @property
    def is_terminated(self) -> bool:
        part = self._parts[-1]
        return part.matcher is not None and not part.is_header and part.matcher.is_terminated


def _words(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Bitmask that allows these tokens: int32 [ceil(vocabulary / 32)]."""
    allowed = np.zeros((vocab_size + 31) // 32 * 32, bool)
    allowed[list(token_ids)] = True
    return np.packbits(allowed, bitorder="little").view("<i4")


def _call_tags(format: tags.Format | None) -> Iterator[tags.Tag]:
    """Tags of a format that begin with the header of a call."""
    match format:
        case tags.Tag():
            if read_header(format.begin).function:
                yield format
        case tags.TriggeredTags(listed) | tags.SeparatedTags(listed) | tags.Sequence(listed) | tags.Or(listed):
            for part in listed:
                yield from _call_tags(part)


def _header_format(functions: Sequence[str], *, has_comments: bool) -> Format:
    """Format of a header behind <|start|>. has_comments: whether messages of commentary may be for the user."""
    type_ = _one_of(_text(""), _in_turn(_one_of(*map(_text, (f" {CONSTRAIN}", CONSTRAIN))), _WORD), _text(" json"))
    channels = [_text(ANALYSIS), _in_turn(_text(FINAL), type_), *([_text(COMMENTARY)] if has_comments else [])]
    headers = [_in_turn(_text(CHANNEL), _one_of(*channels))]
    if functions:
        to = _in_turn(_text(f" to={FUNCTIONS}"), _one_of(*map(_text, functions)))
        channel = _in_turn(_text(CHANNEL), _one_of(_text(COMMENTARY), _text(ANALYSIS)))
        type_ = _one_of(type_, _text(" code"))
        headers += [_in_turn(channel, to, type_), _in_turn(to, channel, type_)]
    return _in_turn(_text(ROLE), _one_of(*headers), _text(MESSAGE))


_WORD: Format = {"type": "regex", "pattern": "[A-Za-z]{1,16}"}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _one_of(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def _in_turn(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}
