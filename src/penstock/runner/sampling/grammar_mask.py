"""Structured outputs: applies the grammar bitmask that the host sends for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from penstock.contract import GrammarOutput, SamplingParams
from penstock.device import Device
from penstock.kernels.logits_shaping import allow_by_bits
from penstock.runner.sampling.logits_transform import LogitsTransform
from penstock.step.logits_rows import LogitsRows

_NOT_MASKED = -1


class GrammarMask(LogitsTransform):
    """Applies a step's bitmask to the rows of requests with structured outputs.

    Other requests keep their logits, whatever the bitmask has for them. No state outlives a step.
    """

    def __init__(self, device: Device, num_slots: int) -> None:
        self._device = device
        self._is_constrained = np.zeros(num_slots, dtype=bool)
        # The current step's bitmask, int32 [rows, words], and the first row of each slot in it.
        self._words: np.ndarray | None = None
        self._first_row = np.full(num_slots, _NOT_MASKED)

    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._is_constrained[slot] = params.structured_outputs is not None

    def remove_request(self, slot: int) -> None:
        self._is_constrained[slot] = False

    def constrains(self, slot: int) -> bool:
        return bool(self._is_constrained[slot])

    def take(self, grammar: GrammarOutput, slots: Mapping[str, int]) -> None:
        """Take the bitmask of the step that is sampled next. slots: by request id; unknown requests are ignored."""
        if not grammar.structured_output_request_ids:
            self._words = None
            return
        self._words = np.frombuffer(grammar.grammar_bitmask, dtype="<i4").reshape(-1, grammar.num_words)
        self._first_row.fill(_NOT_MASKED)
        row = 0
        for index, req_id in enumerate(grammar.structured_output_request_ids):
            if req_id in slots:
                self._first_row[slots[req_id]] = row
            row += grammar.num_rows[index] if grammar.num_rows else 1

    def is_needed(self, slots_np: np.ndarray) -> bool:
        return bool(self._is_constrained[slots_np].any())

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        if self._words is None:
            return logits
        slots = rows.slots_np
        first_row = np.where(self._is_constrained[slots], self._first_row[slots], _NOT_MASKED)
        which = np.flatnonzero(first_row != _NOT_MASKED)
        if not len(which):
            return logits
        numbers = 0 if rows.drafts is None else rows.drafts.numbers_np[which]
        words = self._device.upload(self._words[first_row[which] + numbers])
        index = None if len(which) == len(slots) else self._device.upload(which)
        return allow_by_bits(logits, index, words)
