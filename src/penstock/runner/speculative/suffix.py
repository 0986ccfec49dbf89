"""Suffix decoding: drafts from matches in the request's own tokens and in earlier outputs.

Oliaro et al., "SuffixDecoding", arXiv:2411.04975. Counts equal those of its suffix trees; instead of trees it keeps
the token sequences and an index of n-grams.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.config import SpeculativeConfig
from penstock.contract import NewRequestData
from penstock.runner.speculative.continuations import Continuation, agreeing, follow
from penstock.runner.speculative.earlier_outputs import EarlierOutputs
from penstock.runner.speculative.host import HostSpeculator
from penstock.runner.speculative.speculator import RunnerParts


class SuffixSpeculator(HostSpeculator):
    """Scores continuations from the request's own tokens and from earlier outputs, and drafts the better."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config)
        self._depth = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._min_prob = config.suffix_decoding_min_token_prob
        self._max_outputs = config.suffix_decoding_max_cached_requests
        self.earlier = EarlierOutputs(self._max_outputs)
        # Start of the request's output by slot.
        self._prompt_lengths: dict[int, int] = {}

    def bind(self, parts: RunnerParts) -> None:
        super().bind(parts)
        self.earlier = EarlierOutputs(self._max_outputs)
        self._prompt_lengths.clear()

    def add(self, slot: int, request: NewRequestData) -> None:
        super().add(slot, request)
        # The output before a preemption is in the cache already.
        self._prompt_lengths[slot] = len(request.prefill_token_ids)

    def remove(self, slot: int) -> None:
        super().remove(slot)
        start = self._prompt_lengths.pop(slot, None)
        if start is not None:
            self.earlier.add(self._token_ids[slot, start : self._num_tokens[slot]])

    def draft(self, slot: int, token_ids_L: np.ndarray, num_drafts: int) -> np.ndarray | None:
        last = token_ids_L[-self._depth :]
        own_ends = np.flatnonzero(token_ids_L[:-1] == token_ids_L[-1])
        own = self._best(token_ids_L, agreeing(token_ids_L, own_ends, last), num_drafts)
        earlier = self._best(self.earlier.text, self.earlier.agreeing(last), num_drafts)
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
