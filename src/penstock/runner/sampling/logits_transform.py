"""What a sampling stage is: per-slot parameters, and one operation on the step's logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.kernels.bound_step import StepOutcome
from penstock.runner.logits_rows import LogitsRows


class LogitsTransform(ABC):
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
