"""What the runner asks of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.kernels.sampling import ChosenTokens


class LanguageModel(Protocol):
    """Suffixes: T tokens of the step, R requests, D hidden size, L logits rows, V vocabulary."""

    def __call__(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states [T, D] from int32 token ids and int64 positions; [R, D] of `context.last`, if that is given."""

    def compute_logits(self, hidden_LD: Tensor) -> Tensor:
        """float32 logits [L, V]."""

    def compute_greedy(self, hidden_LD: Tensor) -> ChosenTokens | None:
        """The greedy choice of those logits without writing them down; None where the model has no way to."""
