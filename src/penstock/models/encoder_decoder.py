"""Base of encoder-decoder models, and a layer that their families make of their own parts.

The decoder is the language model that the runner runs step by step; the encoder runs once for a request, over its whole
source.
Suffixes: T tokens of the step, S positions of a source, L logits rows, D hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext, SourceLengths
from penstock.kernels.rotary import Rotation, no_rotation
from penstock.kernels.sampling import ChosenTokens
from penstock.layers.cross_attention import CrossAttention
from penstock.layers.embedding import LMHead, VocabEmbedding
from penstock.layers.norm import norm_of_stream
from penstock.layers.weights import WeightSlot, weight_slots
from penstock.models.causal_lm import CausalLM
from penstock.models.weights import WeightTable, expand_table


class EncoderDecoderLayer(nn.Module):
    """Self attention, in the decoder cross attention, and an MLP, each with a norm before it or after it.

    norms: in the order of the parts. is_pre_norm: they normalise what the parts read; otherwise what was added to.
    """

    def __init__(
        self,
        self_attn: nn.Module,
        encoder_attn: CrossAttention | None,
        mlp: nn.Module,
        norms: Sequence[nn.Module],
        *,
        is_pre_norm: bool,
    ) -> None:
        super().__init__()
        self.is_pre_norm = is_pre_norm
        self.self_attn = self_attn
        self.encoder_attn = encoder_attn
        self.mlp = mlp
        self.norms = nn.ModuleList(norms)

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, positions: Any, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and what is to be added to it, which only a layer with norms before its parts leaves.

        positions: second argument of the self attention, such as a rotation.
        """
        of_all, norms = context.of_all_tokens(), list[Any](self.norms)
        if self.is_pre_norm:
            hidden_TD, residual_TD = norm_of_stream(norms.pop(0), hidden_TD, residual_TD)
        else:
            residual_TD = hidden_TD
        mixed_TD = self.self_attn(hidden_TD, positions, of_all)
        if self.encoder_attn is not None:
            hidden_TD, residual_TD = self._add(norms.pop(0), mixed_TD, residual_TD)
            mixed_TD = self.encoder_attn(hidden_TD, of_all)
        mixed_TD, residual_TD = context.narrowed(mixed_TD), context.narrowed(residual_TD)
        hidden_TD, residual_TD = self._add(norms.pop(0), mixed_TD, residual_TD)
        hidden_TD = self.mlp(hidden_TD, context)
        return (hidden_TD, residual_TD) if self.is_pre_norm else (self._add(norms[0], hidden_TD, residual_TD)[0], None)

    def _add(self, norm: Any, mixed_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Add a part's output to the stream: the next part's input, and the stream; overwrites the output."""
        normed_TD, stream_TD = norm.add_and_norm(mixed_TD, residual_TD)
        return normed_TD, stream_TD if self.is_pre_norm else normed_TD


def run_layers(layers: nn.ModuleList, norm: Any, hidden_TD: Tensor, positions: Any, context: ForwardContext) -> Tensor:
    """Hidden states after all layers and the norm behind them; of last tokens where the context is narrowed.

    norm: None for none. positions: as `EncoderDecoderLayer` takes it.
    """
    residual_TD = None
    for layer, of_layer in zip(layers, context.by_layer(len(layers)), strict=True):
        hidden_TD, residual_TD = layer(hidden_TD, residual_TD, positions, of_layer)
    if residual_TD is not None and norm is not None:
        hidden_TD, _ = norm.add_and_norm(hidden_TD, residual_TD)
        return hidden_TD
    return hidden_TD if norm is None else norm(hidden_TD)


class EncoderDecoder(CausalLM):
    """Decoder with its LM head, and the encoder beside it.

    sources: lengths of the requests' sources. first_position: row of the first token among the decoder's positions.
    shared: embedding of both sides. encoder_heads: heads of the encoder whose scores are in memory at once; 0 for none.
    embedding_name, head_name: of its weight, and of the LM head, in checkpoints.
    """

    embedding_name: ClassVar[str] = "model.shared.weight"
    head_name: ClassVar[str] = "lm_head"
    first_position = 0
    encoder_heads = 0
    unrotated: Tensor

    def __init__(self, max_source_positions: int, shared: VocabEmbedding, lm_head: LMHead) -> None:
        super().__init__()
        self.sources = SourceLengths(max_source_positions)
        self.shared, self.lm_head = shared, lm_head
        self.register_buffer("unrotated", torch.empty(1, 0, device="cpu"), persistent=False)

    @abstractmethod
    def encode(self, source: Tensor, context: ForwardContext) -> Tensor:
        """The encoder's output for one source, [S, D]. source: int32 token ids [S], or what the family reads."""

    @abstractmethod
    def stacks(self) -> list[tuple[str, nn.Module, WeightTable, int]]:
        """Encoder and decoder: prefix of the checkpoint's names, module, weights, and number of layers."""

    @property
    def cross_attentions(self) -> list[CrossAttention]:
        """Cross attention of the decoder's layers."""
        return [module for module in self.modules() if isinstance(module, CrossAttention)]

    def no_rotation(self, positions_T: Tensor, dtype: torch.dtype) -> Rotation | None:
        """Rotation for fused attention without rotary embedding."""
        return no_rotation(self.unrotated, positions_T, dtype)

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        return self.lm_head(hidden_LD, context)  # type: ignore[no-any-return]

    def compute_greedy(self, hidden_LD: Tensor, context: ForwardContext) -> ChosenTokens | None:
        return self.lm_head.compute_greedy(hidden_LD, context)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        slots = {self.embedding_name: weight_slots(self.shared, None)["weight"]}
        head = weight_slots(self.lm_head, None)
        if self.lm_head.tied_to:
            del head["weight"]
        slots |= {f"{self.head_name}.{name}": slot for name, slot in head.items()}
        for prefix, stack, table, num_layers in self.stacks():
            found = expand_table(stack, table, num_layers)
            slots |= {prefix + name: slot for name, slot in found.items()}
        return slots

    def tied_weights(self) -> Mapping[str, str]:
        return {f"{self.head_name}.weight": self.embedding_name} if self.lm_head.tied_to else {}
