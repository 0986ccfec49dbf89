"""What the runner asks of a model, and what it calls it with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.kernels.sampling import ChosenTokens

_NO_EXTRAS: Mapping[str, Tensor] = MappingProxyType({})


class ModelInputs(NamedTuple):
    """What a model is called with in a step, beside the context.

    tokens: int32 ids [T], or embeddings [T, D]. positions: int64 [T], or of the shape that the model takes, such as
    [3, T]. extras: further arguments by name. hidden: what a head goes on from, [T, D], which may be overwritten.
    """

    tokens: Tensor
    positions: Tensor
    extras: Mapping[str, Tensor] = _NO_EXTRAS
    hidden: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Ids and one position of each, as every model here takes them, and hidden states at most."""
        return self.tokens.dim() == 1 and self.positions.dim() == 1 and not self.extras

    def run(self, model: LanguageModel, context: ForwardContext) -> Tensor:
        """The model's hidden states."""
        hidden = () if self.hidden is None else (self.hidden,)
        return model(self.tokens, self.positions, context, *hidden, **self.extras)


class LanguageModel(Protocol):
    """Suffixes: T tokens of the step, R requests, D hidden size, L logits rows, V vocabulary."""

    def __call__(
        self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, /, *hidden: Tensor, **extras: Any
    ) -> Tensor:
        """Hidden states [T, D] from int32 token ids and int64 positions; [R, D] of `context.last`, if that is given.

        Or from whatever the model's own `ModelState` makes, `extras` by name; most models take none.
        """

    def compute_logits(self, hidden_LD: Tensor) -> Tensor:
        """float32 logits [L, V]."""

    def compute_greedy(self, hidden_LD: Tensor) -> ChosenTokens | None:
        """The greedy choice of those logits without writing them down; None where the model has no way to."""
