"""What a sampling stage is: per-slot parameters, and one operation on the step's logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from penstock.contract import SamplingParams


class LogitsRows(NamedTuple):
    """Whose logits a step computed: one row per request.

    slots: int64 [rows]. slots_np: the same on the host. positions: int64 [rows], position of the row's last token.
    """

    slots: Tensor
    slots_np: np.ndarray
    positions: Tensor

    def part(self, which: slice) -> LogitsRows:
        """Some of the rows, one after another."""
        return LogitsRows(self.slots[which], self.slots_np[which], self.positions[which])


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
        """float32 [rows, vocabulary] in and out; may work in place. Rows that do not use the stage stay as they are."""

    def advance(self, rows: LogitsRows, sampled: Tensor, num_sampled: Tensor) -> None:
        """Take note, on the device, of the tokens of the step.

        sampled: int64 [rows]. num_sampled: int64 [rows], 0 where an unfinished prefill makes the token void.
        """
        return
