"""Whose logits a step computes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor


class DraftRows(NamedTuple):
    """Requests and drafts of the rows of a step that checks drafts. int64 [rows] each.

    batch_indices_np: whose row it is, as an index into the step's requests. numbers_np: 0 for the row of the last known
    token, 1 for the one after the first of the request's drafts, and so on. numbers: the same on the device.
    """

    batch_indices_np: np.ndarray
    numbers_np: np.ndarray
    numbers: Tensor


class LogitsRows(NamedTuple):
    """Whose logits a step computed, one row after another; a request has one, and one more for each draft it checks.

    slots: int64 [rows]. slots_np: the same on the host. positions: int64 [rows], position of the row's last token.
    drafts: None where every row is that of a request's last known token, in the order of the requests.
    """

    slots: Tensor
    slots_np: np.ndarray
    positions: Tensor
    drafts: DraftRows | None = None

    def part(self, which: slice) -> LogitsRows:
        """Some of the rows, one after another."""
        drafts = self.drafts
        if drafts is not None:
            drafts = DraftRows(drafts.batch_indices_np[which], drafts.numbers_np[which], drafts.numbers[which])
        return LogitsRows(self.slots[which], self.slots_np[which], self.positions[which], drafts)

    def select(self, which: np.ndarray, index: Tensor) -> LogitsRows:
        """Rows by their numbers, int64, which are given on the host and on the device."""
        slots, positions = self.slots.index_select(0, index), self.positions.index_select(0, index)
        if self.drafts is None:
            return LogitsRows(slots, self.slots_np[which], positions)
        indices_np, numbers_np, numbers = self.drafts
        drafts = DraftRows(indices_np[which], numbers_np[which], numbers.index_select(0, index))
        return LogitsRows(slots, self.slots_np[which], positions, drafts)

    @property
    def max_drafts(self) -> int:
        """The most drafts that come before a row."""
        return 0 if self.drafts is None else int(self.drafts.numbers_np.max(initial=0))

    @property
    def known_positions(self) -> Tensor:
        """int64 [rows], position of the last known token of each row's request."""
        return self.positions if self.drafts is None else self.positions - self.drafts.numbers
