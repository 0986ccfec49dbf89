"""Interface between the runner and a model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.attention import NO_INPUTS, ForwardContext
from penstock.kernels.sampling import ChosenTokens
from penstock.layers.adapters import AdapterRouting


class ModelInputs(NamedTuple):
    """Inputs of a model's forward pass in one step.

    tokens: int32 ids [T], or embeddings [T, D]. positions: int64 [T], or another shape such as [3, T] for M-RoPE.
    named: further step inputs, a row per token each, read by layers as `ForwardContext.inputs`. hidden: input hidden
    states of a later pipeline stage or a draft head, [T, D]; may be overwritten.
    """

    tokens: Tensor
    positions: Tensor
    named: Mapping[str, Tensor] = NO_INPUTS
    hidden: Tensor | None = None

    def run(self, model: LanguageModel, context: ForwardContext) -> Tensor:
        """Return the model's hidden states."""
        hidden = () if self.hidden is None else (self.hidden,)
        if not self.named:
            return model(self.tokens, self.positions, context, *hidden)
        context = replace(context, inputs=self.named)
        with routed(model, self.named, None if context.last is None else context.last.rows):
            return model(self.tokens, self.positions, context, *hidden)


def routed(model: object, named: Mapping[str, Tensor], last_rows: Tensor | None = None) -> AbstractContextManager[None]:
    """Route the rows of calls of the model's parts to their requests' adapters.

    named: step inputs of these rows. last_rows: the rows to which a forward pass narrows after its last attention.
    """
    routing: AdapterRouting | None = getattr(model, "adapters", None) if named else None
    return nullcontext() if routing is None else routing.of_rows(named, last_rows)


class LanguageModel(Protocol):
    """Suffixes: T tokens of the step, R requests, D hidden size, L logits rows, V vocabulary."""

    def __call__(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, /, *hidden: Tensor) -> Tensor:
        """Hidden states [T, D] from int32 token ids and int64 positions; [R, D] with `context.last`.

        Or from the embeddings and positions of the model's own `ModelState`.
        """

    def compute_logits(self, hidden_LD: Tensor) -> Tensor:
        """float32 logits [L, V]."""

    def compute_greedy(self, hidden_LD: Tensor) -> ChosenTokens | None:
        """Greedy tokens without materialising the logits; None without a fused kernel."""
