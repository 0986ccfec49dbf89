"""The draw: argmax of greedy rows, and a random stream per request for the others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.device import Device
from penstock.kernels.sampling import ChosenTokens, draw_tokens, greedy_tokens
from penstock.runner.staging import SlotParameter
from penstock.step.logits_rows import LogitsRows


class Draw:
    """Random numbers depend on (seed, position) only: not on the batch, the step, or earlier draws."""

    def __init__(self, device: Device, num_slots: int) -> None:
        self._seed = SlotParameter(device, num_slots, np.int64, 0)
        self._is_greedy = SlotParameter(device, num_slots, np.bool_, True)
        # While one of the sets is empty, no row needs to be looked up.
        self._drawing_slots: set[int] = set()
        self._greedy_slots: set[int] = set()

    def add_request(self, slot: int, params: SamplingParams) -> None:
        assert params.seed is not None, "the front end draws a seed for every request that brings none"
        self._seed.set(slot, params.seed)
        self._is_greedy.set(slot, params.is_greedy)
        self.remove_request(slot)
        (self._greedy_slots if params.is_greedy else self._drawing_slots).add(slot)

    def remove_request(self, slot: int) -> None:
        self._drawing_slots.discard(slot)
        self._greedy_slots.discard(slot)

    def is_all_greedy(self, rows: LogitsRows) -> bool:
        if not self._drawing_slots or not self._greedy_slots:
            return not self._drawing_slots
        return not self._is_greedy.any_set(rows.slots_np)

    @property
    def seeds(self) -> Tensor:
        """int64 [slots]."""
        return self._seed.tensor

    def is_greedy(self, rows: LogitsRows) -> np.ndarray:
        """bool [rows]"""
        greedy: np.ndarray = self._is_greedy.host[rows.slots_np]
        return greedy

    def sample(self, logits: Tensor, rows: LogitsRows) -> ChosenTokens:
        """Draw a token from each row of fully transformed logits."""
        if self.is_all_greedy(rows):
            return greedy_tokens(logits)
        drawn = draw_tokens(logits, self._seed.tensor, rows.slots, rows.positions)
        if not self._greedy_slots or not self._is_greedy.host[rows.slots_np].any():
            return drawn
        best = greedy_tokens(logits)
        is_greedy = self._is_greedy.tensor.index_select(0, rows.slots)
        return ChosenTokens(*(torch.where(is_greedy, *pair) for pair in zip(best, drawn, strict=True)))
