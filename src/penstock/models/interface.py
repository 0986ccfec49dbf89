"""What the runner asks of a model, and what it calls it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.attention import NO_INPUTS, ForwardContext
from penstock.kernels.sampling import ChosenTokens


class ModelInputs(NamedTuple):
    """Inputs of a model's forward pass in one step.

    tokens: int32 ids [T], or embeddings [T, D]. positions: int64 [T], or of the shape that the model takes, such as
    [3, T]. named: further step inputs, a row per token each, which layers read as `ForwardContext.inputs`. hidden:
    hidden states that a later pipeline stage or a draft head goes on from, [T, D]; they may be overwritten.
    """

    tokens: Tensor
    positions: Tensor
    named: Mapping[str, Tensor] = NO_INPUTS
    hidden: Tensor | None = None

    def run(self, model: LanguageModel, context: ForwardContext) -> Tensor:
        """The model's hidden states."""
        hidden = () if self.hidden is None else (self.hidden,)
        if self.named:
            context = replace(context, inputs=self.named)
        return model(self.tokens, self.positions, context, *hidden)


class LanguageModel(Protocol):
    """Suffixes: T tokens of the step, R requests, D hidden size, L logits rows, V vocabulary."""

    def __call__(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, /, *hidden: Tensor) -> Tensor:
        """Hidden states [T, D] from int32 token ids and int64 positions; [R, D] of `context.last`, if that is given.

        Or from the embeddings and positions that the model's own `ModelState` makes.
        """

    def compute_logits(self, hidden_LD: Tensor) -> Tensor:
        """float32 logits [L, V]."""

    def compute_greedy(self, hidden_LD: Tensor) -> ChosenTokens | None:
        """The greedy choice of those logits without writing them down; None where the model has no way to."""
