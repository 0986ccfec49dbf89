"""Matchers whose library knows nothing of end tokens: those are counted, to be taken back as any other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np


class EndingMatcher(ABC):
    """Follows an output through a library. eos_token_ids: each ends an output.

    end_words: the mask that allows those alone, `end_mask` of them.
    """

    def __init__(self, eos_token_ids: frozenset[int], end_words: np.ndarray) -> None:
        self._eos_token_ids = eos_token_ids
        self._end_words = end_words
        self._num_end_tokens = 0

    def accept(self, token_ids: Sequence[int]) -> int:
        if self._eos_token_ids.isdisjoint(token_ids):
            return 0 if self._num_end_tokens else self._accept_text(token_ids)
        for num_accepted, token_id in enumerate(token_ids):
            if not (self._accept_end() if token_id in self._eos_token_ids else self.accept([token_id])):
                return num_accepted
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        num_end_tokens = min(num_tokens, self._num_end_tokens)
        self._num_end_tokens -= num_end_tokens
        if num_tokens > num_end_tokens:
            self._rollback_text(num_tokens - num_end_tokens)

    def fill(self, words: np.ndarray) -> None:
        if self._num_end_tokens:
            words[:] = self._end_words
        else:
            self._fill_text(words)

    @property
    def is_terminated(self) -> bool:
        return self._num_end_tokens > 0 or self._has_nothing_left()

    def _accept_end(self) -> bool:
        has_ended = self._num_end_tokens > 0 or self._may_end()
        self._num_end_tokens += has_ended
        return has_ended

    @abstractmethod
    def _accept_text(self, token_ids: Sequence[int]) -> int:
        """Take in tokens that end nothing, up to the first that may not come; how many were taken."""

    @abstractmethod
    def _rollback_text(self, num_tokens: int) -> None:
        """Take back the last of those."""

    @abstractmethod
    def _fill_text(self, words: np.ndarray) -> None:
        """As `Matcher.fill`, before any end token."""

    @abstractmethod
    def _may_end(self) -> bool:
        """Whether the output is complete."""

    @abstractmethod
    def _has_nothing_left(self) -> bool:
        """Whether it is complete and nothing can be added."""


def end_mask(vocab_size: int, eos_token_ids: Iterable[int]) -> np.ndarray:
    """The mask that allows these tokens alone: int32 [ceil(vocabulary / 32)]."""
    words = np.zeros((vocab_size + 31) // 32, np.int32)
    for token_id in eos_token_ids:
        words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words
