"""What the runner asks of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.attention import ForwardContext


class LanguageModel(Protocol):
    """Suffixes: T tokens of the step, D hidden size, L logits rows, V vocabulary."""

    def __call__(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states [T, D] from int32 token ids and int64 positions."""

    def compute_logits(self, hidden_LD: Tensor) -> Tensor:
        """float32 logits [L, V]."""
