"""What the runner asks of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.kernels.bound_step import StepAddresses
from penstock.kernels.sampling import ChosenTokens


class BoundGreedy(Protocol):
    """One call from a step's tokens to the next ones, which are in `chosen` then, until the next call."""

    @property
    def chosen(self) -> ChosenTokens: ...

    def run(self) -> None:
        """`compute_greedy` of the model's hidden states."""

    def run_steps(self, step: StepAddresses, max_steps: int, seconds: float) -> list[list[int]] | None:
        """Steps in a row, at most so many, and no more than fit into the time, or until one fails for a request.

        All but the last are recorded in the state. Returns their tokens, a list per request; None where one was all.
        """


class LanguageModel(Protocol):
    """Suffixes: T tokens of the step, R requests, D hidden size, L logits rows, V vocabulary."""

    def __call__(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states [T, D] from int32 token ids and int64 positions; [R, D] of `context.last`, if that is given."""

    def compute_logits(self, hidden_LD: Tensor) -> Tensor:
        """float32 logits [L, V]."""

    def compute_greedy(self, hidden_LD: Tensor) -> ChosenTokens | None:
        """The greedy choice of those logits without writing them down; None where the model has no way to."""

    def bind_greedy(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> BoundGreedy | None:
        """A step of one token of each request, to be run as often as these tensors take a step's values.

        None where the model has no way to do it all at once.
        """
