"""Suffix decoding: drafts from matches in the request's own tokens and in earlier outputs.

Oliaro et al., "SuffixDecoding", arXiv:2411.04975. Token sequences and an n-gram index replace the paper's suffix trees;
counts are equal up to MAX_PLACES.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock.config import SpeculativeConfig
from penstock.contract import NewRequestData
from penstock.runner.speculative.speculator import HostSpeculator, SpeculatorServices


class Continuation(NamedTuple):
    """Draft tokens. score: expected number of accepted ones, by how often each followed."""

    drafts: list[int]
    score: float


def matches(
    text_L: np.ndarray, ends: np.ndarray, last: np.ndarray, length: int = 1
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (match length, positions) for one match length after another, in a text matched with `last`.

    ends: positions, ascending, of a match's last token, where `length` tokens match.
    """
    while len(ends):
        yield length, ends
        if length >= len(last):
            return
        ends = ends[ends >= length]
        ends = ends[text_L[ends - length] == last[-1 - length]]
        length += 1


def follow(text_L: np.ndarray, ends: np.ndarray, num_drafts: int, min_prob: float) -> Continuation:
    """Follow the most frequent next token from these positions; ties go to the latest.

    The path ends before a token whose cumulative probability is below `min_prob`, and at the end of a text: the end of
    the array, or a negative token.
    """
    drafts: list[int] = []
    prob, score = 1.0, 0.0
    positions = ends + 1
    while len(drafts) < num_drafts:
        if len(positions) == 1:
            return _follow_one(text_L, int(positions[0]), drafts, num_drafts, prob, score)
        num_places = len(positions)
        positions = positions[positions < len(text_L)]
        tokens = text_L[positions]
        counts = Counter(token for token in reversed(tokens.tolist()) if token >= 0)
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)
        prob *= counts[token] / num_places
        if prob < min_prob:
            break
        drafts.append(token)
        score += prob
        positions = positions[tokens == token] + 1
    return Continuation(drafts, score)


def _follow_one(
    text_L: np.ndarray, start: int, drafts: list[int], num_drafts: int, prob: float, score: float
) -> Continuation:
    """Follow the rest of the path from a single position."""
    for token in text_L[start : start + num_drafts - len(drafts)].tolist():
        if token < 0:
            break
        drafts.append(token)
        score += prob
    return Continuation(drafts, score)


# Capacity in tokens. Arrays are twice as large, to compact rarely; paged in on use.
MAX_TOKENS = 1 << 20
# Maximum number of candidate positions per n-gram length, the latest ones.
MAX_PLACES = 64
_END = -1
_SHORT, _LONG = 1, 4
_MULTIPLIER = 0x9E3779B97F4A7C15
_HASH_BITS = 18


class _Chains:
    """Positions of a text by the hash of the n-gram that ends there, chained to the previous position of that hash."""

    def __init__(self, length: int, num_positions: int) -> None:
        self.length = length
        self._last = np.full(1 << _HASH_BITS, -1, dtype=np.int32)
        self._previous = np.empty(num_positions, dtype=np.int32)

    def add(self, text_L: np.ndarray, start: int) -> None:
        """Index an output: text_L from `start` on."""
        if len(text_L) - start < self.length:
            return
        hashes = self._hash(text_L[start:])
        first = start + self.length - 1
        order = np.argsort(hashes, kind="stable")
        by_hash = hashes[order]
        positions = first + order.astype(np.int32)
        is_new = np.ones(len(order), dtype=np.bool_)
        is_new[1:] = by_hash[1:] != by_hash[:-1]
        before = np.roll(positions, 1)
        self._previous[positions] = np.where(is_new, self._last[by_hash], before)
        is_last = np.roll(is_new, -1)
        is_last[-1] = True
        self._last[by_hash[is_last]] = positions[is_last]

    def places(self, last: np.ndarray, first_position: int) -> np.ndarray:
        """Return the latest positions from `first_position` on, ascending, where the n-gram `last` may end."""
        position = self._last.item(self._hash(last[-self.length :]).item())
        found: list[int] = []
        while position >= first_position and len(found) < MAX_PLACES:
            found.append(position)
            position = self._previous.item(position)
        return np.array(found[::-1], dtype=np.int64)

    def forget(self) -> None:
        self._last.fill(-1)

    def _hash(self, tokens_L: np.ndarray) -> np.ndarray:
        """Hash of each n-gram, int64 [tokens - length + 1]."""
        hashes = np.zeros(len(tokens_L) - self.length + 1, dtype=np.uint64)
        for offset in range(self.length):
            hashes = (hashes + tokens_L[offset : offset + len(hashes)].astype(np.uint64)) * np.uint64(_MULTIPLIER)
        return (hashes >> np.uint64(64 - _HASH_BITS)).astype(np.int64)


class EarlierOutputs:
    """The last `max_outputs` outputs with at most `max_tokens` tokens in all; older ones are evicted."""

    def __init__(self, max_outputs: int, max_tokens: int = MAX_TOKENS) -> None:
        self._max_outputs = max_outputs
        self._max_tokens = max_tokens
        num_positions = 2 * max_tokens if max_outputs else 0
        # Outputs, each followed by a separator.
        self._text = np.empty(num_positions, dtype=np.int32)
        self._num_positions = 0
        self._starts: deque[int] = deque()
        self._chains = [_Chains(length, num_positions) for length in (_SHORT, _LONG)] if max_outputs else []

    @property
    def text(self) -> np.ndarray:
        """The outputs, a negative token after each: int32 [tokens]."""
        return self._text[: self._num_positions]

    @property
    def num_outputs(self) -> int:
        return len(self._starts)

    def add(self, token_ids_L: np.ndarray) -> None:
        """Add an output; of one that is too long, its end."""
        token_ids_L = token_ids_L[-(self._max_tokens - 1) :]
        if not self._max_outputs or not len(token_ids_L):
            return
        if self._num_positions + len(token_ids_L) + 1 > len(self._text):
            self._drop_forgotten()
        start, end = self._num_positions, self._num_positions + len(token_ids_L)
        self._text[start:end] = token_ids_L
        self._text[end] = _END
        self._num_positions = end + 1
        self._starts.append(start)
        for chains in self._chains:
            chains.add(self._text[:end], start)
        while len(self._starts) > self._max_outputs or self._num_positions - self._starts[0] > self._max_tokens:
            self._starts.popleft()

    def matches(self, last: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (match length, latest positions) for one match length after another, for the tokens `last`."""
        if not self._starts:
            return
        text, first = self.text, self._starts[0]
        for chains, most in zip(self._chains, (_LONG - 1, len(last)), strict=True):
            length = chains.length
            if len(last) < length:
                return
            ends = chains.places(last, first + length - 1)
            for back in range(length):
                ends = ends[text[ends - back] == last[-1 - back]]
            yield from matches(text, ends, last[-most:], length)

    def _drop_forgotten(self) -> None:
        """Compact the arrays: move the retained outputs to the front."""
        first = self._starts[0] if self._starts else self._num_positions
        kept = self._text[first : self._num_positions].copy()
        self._text[: len(kept)] = kept
        self._num_positions = len(kept)
        self._starts = deque(start - first for start in self._starts)
        for chains in self._chains:
            chains.forget()
            for start, end in zip(self._starts, [*list(self._starts)[1:], len(kept)], strict=True):
                chains.add(self._text[: end - 1], start)


class SuffixSpeculator(HostSpeculator):
    """Scores continuations from the request's own tokens and from earlier outputs, and drafts the better."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config)
        self._depth = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._min_prob = config.suffix_decoding_min_token_prob
        self._max_outputs = config.suffix_decoding_max_cached_requests
        self.earlier = EarlierOutputs(self._max_outputs)
        # Length of prefill_token_ids, by slot.
        self._prefill_lengths: dict[int, int] = {}

    def bind(self, services: SpeculatorServices) -> None:
        super().bind(services)
        self.earlier = EarlierOutputs(self._max_outputs)
        self._prefill_lengths.clear()

    def add(self, slot: int, request: NewRequestData) -> None:
        super().add(slot, request)
        # Output before a preemption is in `earlier` already.
        self._prefill_lengths[slot] = len(request.prefill_token_ids)

    def remove(self, slot: int) -> None:
        super().remove(slot)
        start = self._prefill_lengths.pop(slot, None)
        if start is not None:
            self.earlier.add(self._token_ids[slot, start : self._num_tokens[slot]])

    def draft(self, slot: int, token_ids_L: np.ndarray, num_drafts: int) -> np.ndarray | None:
        last = token_ids_L[-self._depth :]
        own_ends = np.flatnonzero(token_ids_L[:-1] == token_ids_L[-1])
        own = self._best(token_ids_L, matches(token_ids_L, own_ends, last), num_drafts)
        earlier = self._best(self.earlier.text, self.earlier.matches(last), num_drafts)
        best = own if own.score >= earlier.score else earlier
        return np.array(best.drafts, dtype=np.int32) if best.drafts else None

    def _best(self, text_L: np.ndarray, places: Iterator[tuple[int, np.ndarray]], num_drafts: int) -> Continuation:
        best = Continuation([], 0.0)
        pending: tuple[int, np.ndarray] | None = None
        for length, ends in places:
            allowed = min(num_drafts, int(length * self._factor), self._depth - length)
            # Longer matches at the same positions: the largest draft length allowed for any of them counts.
            if pending is not None and len(pending[1]) == len(ends):
                pending = max(allowed, pending[0]), ends
                continue
            best = self._better(best, text_L, pending)
            pending = allowed, ends
        return self._better(best, text_L, pending)

    def _better(self, best: Continuation, text_L: np.ndarray, places: tuple[int, np.ndarray] | None) -> Continuation:
        if places is None or places[0] < best.score:
            return best
        found = follow(text_L, places[1], places[0], self._min_prob)
        return found if found.score >= best.score else best
