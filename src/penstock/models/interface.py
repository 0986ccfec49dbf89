"""Interface between the runner and a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.attention import NO_CONTEXT, NO_INPUTS, ForwardContext
from penstock.kernels.sampling import ChosenTokens, greedy_tokens


class ModelInputs(NamedTuple):
    """Inputs of a model's forward pass in one step.

    tokens: int32 ids [T], or embeddings [T, D]. positions: int64 [T], or another shape such as [3, T] for M-RoPE.
    named: further step inputs, a row per token each, read by layers with `ForwardContext.input`. hidden: input hidden
    states of a later pipeline stage or a draft head, [T, D]; may be overwritten.
    """

    tokens: Tensor
    positions: Tensor
    named: Mapping[str, Tensor] = NO_INPUTS
    hidden: Tensor | None = None

    def run(self, model: LanguageModel, context: ForwardContext) -> Tensor:
        """Return the model's hidden states."""
        hidden = () if self.hidden is None else (self.hidden,)
        return model(self.tokens, self.positions, context.with_inputs(self.named), *hidden)

    @property
    def head_context(self) -> ForwardContext:
        """Context of the LM head for the rows of all tokens."""
        return NO_CONTEXT.with_inputs(self.named)


class LanguageModel(Protocol):
    """Suffixes: T tokens of the step, R requests, D hidden size, L logits rows, V vocabulary."""

    def __call__(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext, /, *hidden: Tensor) -> Tensor:
        """Hidden states [T, D] from int32 token ids and int64 positions; [R, D] with `context.last`.

        Or from the embeddings and positions of the model's own `ModelState`.
        """

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        """float32 logits [L, V]. context: of the logits rows."""

    def compute_greedy(self, hidden_LD: Tensor, context: ForwardContext) -> ChosenTokens | None:
        """Greedy tokens without materialising the logits; None without a fused kernel. context: of the logits rows."""


def choose_greedy(model: LanguageModel, hidden_LD: Tensor, context: ForwardContext) -> ChosenTokens:
    """Greedy tokens of the logits rows, by the model's fused kernel where it has one."""
    chosen = model.compute_greedy(hidden_LD, context)
    return greedy_tokens(model.compute_logits(hidden_LD, context)) if chosen is None else chosen
