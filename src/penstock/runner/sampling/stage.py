"""What a sampling stage is: per-slot parameters, and one operation on the step's logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.kernels.bound_step import StepOutcome


class DraftRows(NamedTuple):
    """Of the rows of a step that checks drafts. int64 [rows] each.

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


class SamplingStage(ABC):
    """A stage holds its own parameters by slot and is skipped when no request of the step needs it."""

    @abstractmethod
    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        """Take over a new request; whatever the slot held before is overwritten.

        output_token_ids: what it generated before it was preempted; else empty.
        Raises InvalidParameter when the request asks for what cannot be done; it ends with that error then.
        """

    def remove_request(self, slot: int) -> None:
        """The slot's request is gone; the next one may come at once."""
        return

    @abstractmethod
    def is_needed(self, slots_np: np.ndarray) -> bool:
        """Whether `apply` could change rows of these slots; known to the host, so nothing is waited for."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        """float32 [rows, vocabulary] in and out; may work in place. Rows that do not use the stage stay as they are.

        The tokens before a row, the drafts among them, are in the runner's table up to the row's position. What the
        stage keeps of a request's tokens knows nothing of drafts before `advance`.
        """

    def advance(self, slots: Tensor, slots_np: np.ndarray, outcome: StepOutcome) -> None:
        """Take note, on the device, of what the step's requests, whose slots these are, have sampled."""
        return
