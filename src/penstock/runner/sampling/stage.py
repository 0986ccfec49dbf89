"""What a sampling stage is: per-slot parameters, and one operation on the step's logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.contract import SamplingParams


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Whose logits a step computed: one row per request.

    slots: int64 [rows]. slots_np: the same on the host. positions: int64 [rows], position of the row's last token.
    """

    slots: Tensor
    slots_np: np.ndarray
    positions: Tensor


class SamplingStage(ABC):
    """A stage holds its own parameters by slot and is skipped when no request of the step needs it."""

    @abstractmethod
    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Take over a new request's parameters; whatever the slot held before is overwritten."""

    @abstractmethod
    def is_needed(self, rows: LogitsRows) -> bool:
        """Whether `apply` would change any of these rows; known to the host, so nothing is waited for."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        """float32 [rows, vocabulary] in and out; may work in place. Rows that do not use the stage stay as they are."""
