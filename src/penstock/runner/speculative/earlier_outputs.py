"""Outputs of requests that have ended, as many as are kept, and the places in them of another's last tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from penstock.runner.speculative.continuations import agreeing

# Tokens that are remembered. The arrays hold twice as many; they take memory as they fill.
MAX_TOKENS = 1 << 20
# Places that are looked at for each number of tokens, the last ones.
MAX_PLACES = 64
_END = -1
_SHORT, _LONG = 1, 4
_MULTIPLIER = 0x9E3779B97F4A7C15
_HASH_BITS = 18


class _Chains:
    """Positions of a text by a hash of the few tokens that end there, each with the position before it of that hash."""

    def __init__(self, length: int, num_positions: int) -> None:
        self.length = length
        self._last = np.full(1 << _HASH_BITS, -1, dtype=np.int32)
        self._previous = np.empty(num_positions, dtype=np.int32)

    def add(self, text_L: np.ndarray, start: int) -> None:
        """Take in the tokens of an output, which is text_L from `start` on."""
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
        """The last positions from `first_position` on, rising, where these tokens may end."""
        position = self._last.item(self._hash(last[-self.length :]).item())
        found: list[int] = []
        while position >= first_position and len(found) < MAX_PLACES:
            found.append(position)
            position = self._previous.item(position)
        return np.array(found[::-1], dtype=np.int64)

    def forget(self) -> None:
        self._last.fill(-1)

    def _hash(self, tokens_L: np.ndarray) -> np.ndarray:
        """int64 [tokens - length + 1]"""
        hashes = np.zeros(len(tokens_L) - self.length + 1, dtype=np.uint64)
        for offset in range(self.length):
            hashes = (hashes + tokens_L[offset : offset + len(hashes)].astype(np.uint64)) * np.uint64(_MULTIPLIER)
        return (hashes >> np.uint64(64 - _HASH_BITS)).astype(np.int64)


class EarlierOutputs:
    """The last `max_outputs` outputs, and no more than `max_tokens` of them; older ones are forgotten."""

    def __init__(self, max_outputs: int, max_tokens: int = MAX_TOKENS) -> None:
        self._max_outputs = max_outputs
        self._max_tokens = max_tokens
        num_positions = 2 * max_tokens if max_outputs else 0
        # One output after another, each with an end.
        self._text = np.empty(num_positions, dtype=np.int32)
        self._num_positions = 0
        self._starts: deque[int] = deque()
        self._chains = [_Chains(length, num_positions) for length in (_SHORT, _LONG)] if max_outputs else []

    @property
    def text(self) -> np.ndarray:
        """int32 [tokens]: the outputs with a negative number after each."""
        return self._text[: self._num_positions]

    @property
    def num_outputs(self) -> int:
        return len(self._starts)

    def add(self, token_ids_L: np.ndarray) -> None:
        """Remember an output; of one that is too long, its end."""
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

    def agreeing(self, last: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """For one length after another, the last places that agree with so many of the last tokens."""
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
            yield from agreeing(text, ends, last[-most:], length)

    def _drop_forgotten(self) -> None:
        """Move what is remembered to the front."""
        first = self._starts[0] if self._starts else self._num_positions
        kept = self._text[first : self._num_positions].copy()
        self._text[: len(kept)] = kept
        self._num_positions = len(kept)
        self._starts = deque(start - first for start in self._starts)
        for chains in self._chains:
            chains.forget()
            for start, end in zip(self._starts, [*list(self._starts)[1:], len(kept)], strict=True):
                chains.add(self._text[: end - 1], start)
