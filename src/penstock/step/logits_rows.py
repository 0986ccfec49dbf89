"""Rows of a step whose logits are computed: for sampling, and for prompt log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor


class DraftRows(NamedTuple):
    """Requests and draft numbers of the logits rows, in a step that verifies drafts. int64 [rows] each.

    batch_indices_np: batch index of the row's request. numbers_np: 0 for the row after the last known token, n for the
    row after the request's n-th draft. numbers: the same on the device.
    """

    batch_indices_np: np.ndarray
    numbers_np: np.ndarray
    numbers: Tensor


class LogitsRows(NamedTuple):
    """The rows of a step's logits: one per request, and one more for each draft that is verified.

    slots: int64 [rows]. slots_np: the same on the host. positions: int64 [rows], position of the row's last token.
    drafts: None in a step without drafts, whose rows are in batch order.
    """

    slots: Tensor
    slots_np: np.ndarray
    positions: Tensor
    drafts: DraftRows | None = None

    def part(self, which: slice) -> LogitsRows:
        """A contiguous part of the rows."""
        drafts = self.drafts
        if drafts is not None:
            drafts = DraftRows(drafts.batch_indices_np[which], drafts.numbers_np[which], drafts.numbers[which])
        return LogitsRows(self.slots[which], self.slots_np[which], self.positions[which], drafts)

    def select(self, which: np.ndarray, index: Tensor) -> LogitsRows:
        """Select rows by their numbers, int64: `which` on the host, `index` the same on the device."""
        slots, positions = self.slots.index_select(0, index), self.positions.index_select(0, index)
        if self.drafts is None:
            return LogitsRows(slots, self.slots_np[which], positions)
        indices_np, numbers_np, numbers = self.drafts
        drafts = DraftRows(indices_np[which], numbers_np[which], numbers.index_select(0, index))
        return LogitsRows(slots, self.slots_np[which], positions, drafts)

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts before a row."""
        return 0 if self.drafts is None else int(self.drafts.numbers_np.max(initial=0))

    @property
    def known_positions(self) -> Tensor:
        """Position of the last known token of each row's request, int64 [rows]."""
        return self.positions if self.drafts is None else self.positions - self.drafts.numbers


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Tokens of a step whose logits give prompt log-probabilities.

    req_ids, counts: the requests, and tokens of each. hidden_indices: token indices in the step, int64.
    target_indices: cells of the token table with the next tokens, int64.
    num_logprobs: maximum number that one of the requests asks for.
    """

    req_ids: list[str]
    counts: list[int]
    hidden_indices: np.ndarray
    target_indices: np.ndarray
    num_logprobs: int
