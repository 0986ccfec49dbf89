"""Constraints that begin after the model's reasoning, which is unconstrained up to its end marker."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import numpy as np

from penstock.config.reasoning import ReasoningMarkers
from penstock.contract import StructuredOutputsParams
from penstock.structured.backend import CompiledGrammar, GrammarBackend, Matcher, TextTokenizer

# Limit of the blank tokens that a chat template writes after the end of reasoning.
_MOST_BLANK_TOKENS = 16


class _State(Enum):
    """State of an output at its start: it may begin to reason, reasons, or is constrained."""

    MAY_REASON = auto()
    REASONS = auto()
    CONSTRAINED = auto()


@dataclass(frozen=True, slots=True)
class ReasoningTokens:
    """Token ids of reasoning markers.

    start, end: the markers, of one token or several. starts_in_reasoning: as in `ReasoningMarkers`.
    decode: detokenises, with special tokens. implied_ends: markers that end the reasoning if the constraint may begin
    with them; they are part of the constrained text. other_starts, other_ends: other spellings of the markers, by
    `other_spellings`.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    starts_in_reasoning: bool
    decode: Callable[[Sequence[int]], str]
    implied_ends: tuple[tuple[int, ...], ...] = ()
    other_starts: tuple[tuple[int, ...], ...] = ()
    other_ends: tuple[tuple[int, ...], ...] = ()

    @property
    def ends(self) -> tuple[tuple[int, ...], ...]:
        return (self.end, *self.other_ends)

    def state_after(self, prompt_token_ids: Sequence[int]) -> tuple[_State, tuple[int, ...]]:
        """Return the state of an output after a prompt, and the last prompt tokens of reasoning that has begun.

        An end marker with text after it belongs to an earlier answer, and does not count.
        """
        reasons_from, ended_at, implied_at = (
            max((after_last(prompt_token_ids, marker) for marker in markers), default=-1)
            for markers in ((self.start, *self.other_starts), self.ends, self.implied_ends)
        )
        if reasons_from > max(ended_at, implied_at):
            return _State.REASONS, tuple(
                prompt_token_ids[max(reasons_from, len(prompt_token_ids) - max(map(len, self.ends))) :]
            )
        if ended_at > implied_at and self._is_blank(prompt_token_ids[ended_at:]):
            return _State.CONSTRAINED, ()
        return (_State.REASONS if self.starts_in_reasoning else _State.MAY_REASON), ()

    def reasons_after(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether an output reasons from its first token on."""
        return self.state_after(prompt_token_ids)[0] is _State.REASONS

    def num_tokens_of(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> int:
        """Return the number of an output's first tokens that are reasoning, with the markers around it."""
        begin = 0
        if not self.reasons_after(prompt_token_ids):
            starts = [after_first(token_ids, marker) for marker in (self.start, *self.other_starts)]
            begin = min((start for start in starts if start >= 0), default=-1)
            if begin < 0:
                return 0
        behind = token_ids[begin:]
        ends = [after_first(behind, marker) for marker in self.ends]
        ends += [end - len(marker) for marker in self.implied_ends if (end := after_first(behind, marker)) >= 0]
        return begin + min((end for end in ends if end >= 0), default=len(behind))

    def _is_blank(self, token_ids: Sequence[int]) -> bool:
        return len(token_ids) <= _MOST_BLANK_TOKENS and not self.decode(token_ids).strip()


class ReasoningBackend:
    """Grammar backend whose constraints begin after reasoning. eos_token_ids: not allowed within reasoning."""

    def __init__(
        self, backend: GrammarBackend, tokens: ReasoningTokens, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._backend = backend
        self._tokens = tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        allowed = np.zeros((vocab_size + 31) // 32 * 32, bool)
        allowed[:vocab_size] = True
        allowed[list(self._eos_token_ids)] = False
        self._free_words = np.packbits(allowed, bitorder="little").view("<i4")

    def compile(self, params: StructuredOutputsParams) -> ReasoningGrammar:
        return ReasoningGrammar(self._backend.compile(params), self._tokens, self._eos_token_ids, self._free_words)


class ReasoningGrammar:
    """Compiled constraint that begins after reasoning."""

    def __init__(
        self,
        grammar: CompiledGrammar,
        tokens: ReasoningTokens,
        eos_token_ids: frozenset[int],
        free_words: np.ndarray,
    ) -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._eos_token_ids = eos_token_ids
        self._free_words = free_words

    def start(self, prompt_token_ids: Sequence[int] = ()) -> ReasoningMatcher:
        matcher = self._grammar.start(prompt_token_ids)
        return ReasoningMatcher(matcher, self._tokens, self._eos_token_ids, self._free_words, prompt_token_ids)


class ReasoningMatcher:
    """Matcher of an output through its reasoning, and then through its constraint.

    An output that may still begin to reason is a prefix of the start marker, and may fit the constraint as well: the
    next tokens decide. All state follows from the prompt and the output, so that draft tokens can be rolled back.
    """

    def __init__(
        self,
        matcher: Matcher,
        tokens: ReasoningTokens,
        eos_token_ids: frozenset[int],
        free_words: np.ndarray,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self._matcher = matcher
        self._start, self._ends, self._implied_ends = tokens.start, tokens.ends, tokens.implied_ends
        self._longest_end = max(map(len, self._ends))
        self._eos_token_ids = eos_token_ids
        self._free_words = free_words
        state, self._before = tokens.state_after(prompt_token_ids)
        self._output: list[int] = []
        # Output positions: start of the reasoning, start of the constraint, and where the latter was decided.
        self._reasons_from = 0 if state is _State.REASONS else None
        self._constrained_from = 0 if state is _State.CONSTRAINED else None
        self._decided_at = 0

    def accept(self, token_ids: Sequence[int]) -> int:
        for num_accepted, token_id in enumerate(token_ids):
            if not self._accept_one(token_id):
                return num_accepted
            self._output.append(token_id)
        return len(token_ids)

    def _accept_one(self, token_id: int) -> bool:
        if self._constrained_from is not None:
            return self._matcher.accept([token_id]) == 1
        if self._reasons_from is None:
            return self._begin(token_id)
        if token_id in self._eos_token_ids:
            return False
        num_known = len(self._output)
        tail = self._output[max(self._reasons_from, num_known - self._longest_end) :]
        known = (*self._before, *tail, token_id) if self._reasons_from == 0 else (*tail, token_id)
        if any(known[-len(end) :] == end for end in self._ends):
            self._constrained_from = self._decided_at = num_known + 1
        else:
            self._end_if_implied(token_id)
        return True

    def _end_if_implied(self, token_id: int) -> None:
        """Begin the constraint with a marker that a token completes, if it allows the marker."""
        assert self._reasons_from is not None, "only reasoning can be ended"
        for marker in self._implied_ends:
            begin = len(self._output) + 1 - len(marker)
            if token_id != marker[-1] or begin < self._reasons_from or (*self._output[begin:], token_id) != marker:
                continue
            num_accepted = self._matcher.accept(marker)
            if num_accepted == len(marker):
                self._constrained_from, self._decided_at = begin, len(self._output) + 1
                return
            self._matcher.rollback(num_accepted)

    def _begin(self, token_id: int) -> bool:
        """Accept a token while the output is a prefix of the start marker."""
        num_known = len(self._output)
        if token_id == self._start[num_known]:
            if num_known + 1 == len(self._start):
                self._reasons_from = num_known + 1
            return True
        num_accepted = self._matcher.accept([*self._output, token_id])
        if num_accepted <= num_known:
            self._matcher.rollback(num_accepted)
            return False
        self._constrained_from, self._decided_at = 0, num_known + 1
        return True

    def rollback(self, num_tokens: int) -> None:
        num_left = len(self._output) - num_tokens
        if self._constrained_from is not None:
            if num_left < self._decided_at:
                self._matcher.rollback(len(self._output) - self._constrained_from)
                self._constrained_from = None
            else:
                self._matcher.rollback(num_tokens)
        if self._reasons_from is not None and num_left < self._reasons_from:
            self._reasons_from = None
        del self._output[num_left:]

    def fill(self, words: np.ndarray) -> None:
        if self._constrained_from is not None:
            self._matcher.fill(words)
        elif self._reasons_from is not None:
            words[:] = self._free_words
        else:
            self._fill_either(words)

    def _fill_either(self, words: np.ndarray) -> None:
        """Allow the tokens that continue the start marker or the constraint."""
        words[:] = 0
        num_accepted = self._matcher.accept(self._output)
        if num_accepted == len(self._output):
            self._matcher.fill(words)
        self._matcher.rollback(num_accepted)
        marker = self._start[len(self._output)]
        words.view(np.uint32)[marker // 32] |= np.uint32(1 << marker % 32)

    @property
    def is_terminated(self) -> bool:
        return self._constrained_from is not None and self._matcher.is_terminated


def reasoning_tokens(tokenizer: TextTokenizer, markers: ReasoningMarkers) -> ReasoningTokens:
    """Token ids of reasoning markers."""
    encode = partial(tokenizer.encode, add_special_tokens=False)
    start, end, *implied_ends = (tuple(encode(text)) for text in (markers.start, markers.end, *markers.implied_ends))
    return ReasoningTokens(
        start,
        end,
        markers.starts_in_reasoning,
        partial(tokenizer.decode, skip_special_tokens=False),
        tuple(filter(None, implied_ends)),
        other_spellings(encode, markers.start),
        other_spellings(encode, markers.end),
    )


def other_spellings(encode: Callable[[str], Sequence[int]], marker: str) -> tuple[tuple[int, ...], ...]:
    """Token ids of a marker whose first or last token includes a character before it or whitespace after it.

    Only markers that are not special tokens have them. encode: tokenises a text.
    """
    found = {tuple(encode(marker)): None}
    for before in ("", *string.punctuation, " ", "\n"):
        for after in ("", " ", "\n", "\n\n"):
            token_ids = tuple(encode(f"{before}{marker}{after}"))
            if all(after_last(token_ids, known) < 0 for known in found):
                found[token_ids] = None
    return tuple(found)[1:]


def after_first(token_ids: Sequence[int], marker: Sequence[int]) -> int:
    """Return the position after the first occurrence of a marker; -1 if there is none."""
    wanted = list(marker)
    for position in range(len(wanted), len(token_ids) + 1):
        if token_ids[position - 1] == wanted[-1] and list(token_ids[position - len(wanted) : position]) == wanted:
            return position
    return -1


def after_last(token_ids: Sequence[int], marker: Sequence[int]) -> int:
    """Return the position after the last occurrence of a marker; -1 if there is none."""
    wanted = list(marker)
    for position in range(len(token_ids), len(wanted) - 1, -1):
        if token_ids[position - 1] == wanted[-1] and list(token_ids[position - len(wanted) : position]) == wanted:
            return position
    return -1
