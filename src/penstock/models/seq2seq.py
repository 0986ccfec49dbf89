"""Encoder and decoder of sequence-to-sequence models (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

The decoder is the language model that the runner runs step by step; the encoder runs once for a request, over its whole
source. A family's own file reads its configuration.
Suffixes: T tokens of the step, S positions of a source, L logits rows, D hidden size, X concatenated heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext, LayerAttention, SourceLengths
from penstock.kernels.embedding import embedding
from penstock.kernels.rotary import Rotation, no_rotation
from penstock.kernels.rows import sum_rows
from penstock.kernels.sampling import ChosenTokens
from penstock.layers.attention import Attention
from penstock.layers.cross_attention import CrossAttention
from penstock.layers.embedding import LMHead, ScaledVocabEmbedding, VocabEmbedding
from penstock.layers.mlp import PlainMLP
from penstock.layers.norm import LayerNorm, norm_of_stream
from penstock.layers.parallel_linear import QKVParallelLinear, RowParallelLinear
from penstock.layers.weights import Shard, WeightSlot, weight_slots
from penstock.models.causal_lm import CausalLM
from penstock.models.weights import Into, WeightTable, expand_table
from penstock.parallel import ParallelState

# Step input: the row of the decoder's position table, int32 per token.
POSITION_IDS = "decoder_position_ids"
ENCODER, _DECODER = "model.encoder.", "model.decoder."
_LAYER_WEIGHTS: WeightTable = {
    "layers.*.self_attn.q_proj": Into("layers.*.self_attn.qkv_proj", shard="q"),
    "layers.*.self_attn.k_proj": Into("layers.*.self_attn.qkv_proj", shard="k"),
    "layers.*.self_attn.v_proj": Into("layers.*.self_attn.qkv_proj", shard="v"),
    "layers.*.self_attn.out_proj": Into("layers.*.self_attn.o_proj"),
    "layers.*.self_attn_layer_norm": Into("layers.*.norms.0"),
    "layers.*.fc1": Into("layers.*.mlp.up_proj"),
    "layers.*.fc2": Into("layers.*.mlp.down_proj"),
}
_ENCODER_WEIGHTS: WeightTable = {**_LAYER_WEIGHTS, "layers.*.final_layer_norm": Into("layers.*.norms.1")}
_DECODER_WEIGHTS: WeightTable = {
    **_LAYER_WEIGHTS,
    "layers.*.encoder_attn.q_proj": Into("layers.*.encoder_attn.q_proj"),
    "layers.*.encoder_attn.k_proj": Into("layers.*.encoder_attn.k_proj"),
    "layers.*.encoder_attn.v_proj": Into("layers.*.encoder_attn.v_proj"),
    "layers.*.encoder_attn.out_proj": Into("layers.*.encoder_attn.o_proj"),
    "layers.*.encoder_attn_layer_norm": Into("layers.*.norms.1"),
    "layers.*.final_layer_norm": Into("layers.*.norms.2"),
}


@dataclass(frozen=True, slots=True)
class StackConfig:
    """Sizes of the encoder, or of the decoder."""

    num_layers: int
    num_heads: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class Seq2SeqConfig:
    """Parameters of both stacks.

    is_pre_norm: layers normalise what they read; otherwise what they have added to. norms_embeddings: a norm follows
    the embeddings. has_final_norm: one follows the last layer. has_key_bias: of the attention's keys; the other
    projections have one.
    embedding_scale: factor on the embeddings of tokens. max_source_positions: positions of the longest source.
    num_positions: of the decoder. first_position: row of a text's first token among the positions.
    make_positions: makes the position table of a stack, of so many rows; it may be one without weights.
    has_logits_bias: the LM head has a bias.
    """

    vocab_size: int
    hidden_size: int
    encoder: StackConfig
    decoder: StackConfig
    activation: str
    is_pre_norm: bool
    norms_embeddings: bool
    has_final_norm: bool
    embedding_scale: float
    max_source_positions: int
    num_positions: int
    first_position: int
    make_positions: Callable[[int], VocabEmbedding | SinusoidalPositions]
    has_logits_bias: bool
    has_key_bias: bool = True
    norm_eps: float = 1e-5


class SinusoidalPositions(nn.Module):
    """Position table without weights: the sines of all frequencies, then the cosines.

    frequencies_F: float64, of D / 2 pairs.
    """

    weight: Tensor

    def __init__(self, num_rows: int, frequencies_F: Tensor) -> None:
        super().__init__()
        angles_PF = torch.arange(num_rows, dtype=torch.float64, device="cpu").unsqueeze(1) * frequencies_F
        table_PD = torch.cat((angles_PF.sin(), angles_PF.cos()), dim=1).float()
        self.register_buffer("weight", table_PD, persistent=False)

    def forward(self, rows_T: Tensor, context: ForwardContext) -> Tensor:
        """Rows of the table: [T, D]."""
        return embedding(rows_T, self.weight, self.weight.dtype)


@dataclass(frozen=True, slots=True)
class _BeforeZeros(WeightSlot):
    """Slot of a tensor that is followed by zeros."""

    def fill(self, part: Tensor) -> None:
        with torch.no_grad():
            self.target[: len(part)].copy_(part)
            self.target[len(part) :].zero_()


class QKVWithoutKeyBias(QKVParallelLinear):
    """Fused projections whose keys have no bias: it is zero."""

    def fused_slots(self, shard: Shard) -> dict[str, WeightSlot]:
        slots = super().fused_slots(shard)
        if shard == "k":
            del slots["bias"]
        elif shard == "q":
            assert self.bias is not None, "of queries and values"
            bias = slots["bias"]
            slots["bias"] = _BeforeZeros(bias.shape, self.bias[: self.rows_of("k").stop], bias.part)
        return slots


class SelfAttention(nn.Module):
    """Self attention without rotary embedding. is_causal: of the decoder, over its KV cache."""

    def __init__(
        self, name: str, config: Seq2SeqConfig, num_heads: int, parallel: ParallelState, *, is_causal: bool
    ) -> None:
        super().__init__()
        size = config.hidden_size
        head_size = size // num_heads
        make = QKVParallelLinear if config.has_key_bias else QKVWithoutKeyBias
        self.qkv_proj = make(
            size, num_heads=num_heads, num_kv_heads=num_heads, head_size=head_size, bias=True, parallel=parallel
        )
        self.attn = Attention(
            LayerAttention(
                name,
                num_heads=self.qkv_proj.num_heads,
                num_kv_heads=self.qkv_proj.num_kv_heads,
                head_size=head_size,
                scale=head_size**-0.5,
                is_causal=is_causal,
            )
        )
        self.o_proj = RowParallelLinear(size, size, bias=True, parallel=parallel)

    def forward(self, hidden_TD: Tensor, rotation: Rotation | None, context: ForwardContext) -> Tensor:
        mixed_TX = self.attn.from_projection(self.qkv_proj(hidden_TD, context), None, rotation, context)
        return self.o_proj(mixed_TX, context)  # type: ignore[no-any-return]


class Seq2SeqLayer(nn.Module):
    """Self attention, in the decoder cross attention, and an MLP, each with a norm before it or after it."""

    def __init__(
        self,
        name: str,
        config: Seq2SeqConfig,
        sizes: StackConfig,
        parallel: ParallelState,
        sources: SourceLengths | None,
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.is_pre_norm = config.is_pre_norm
        self.self_attn = SelfAttention(
            f"{name}.self_attn", config, sizes.num_heads, parallel, is_causal=sources is not None
        )
        self.encoder_attn = None
        if sources is not None:
            head_size = size // sizes.num_heads
            self.encoder_attn = CrossAttention(
                f"{name}.encoder_attn",
                size,
                num_heads=sizes.num_heads,
                head_size=head_size,
                scale=head_size**-0.5,
                bias=True,
                key_bias=config.has_key_bias,
                sources=sources,
                parallel=parallel,
            )
        self.mlp = PlainMLP(size, sizes.intermediate_size, activation=config.activation, parallel=parallel)
        self.norms = nn.ModuleList(LayerNorm(size, config.norm_eps) for _ in range(2 if sources is None else 3))

    def forward(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation | None, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and what is to be added to it, which only a layer with norms before its parts leaves.

        rotation: of no dimension, where the decoder's attention is fused with one.
        """
        of_all, norms = context.of_all_tokens(), list(self.norms)
        if self.is_pre_norm:
            hidden_TD, residual_TD = norm_of_stream(norms.pop(0), hidden_TD, residual_TD)  # type: ignore[arg-type]
        else:
            residual_TD = hidden_TD
        mixed_TD = self.self_attn(hidden_TD, rotation, of_all)
        if self.encoder_attn is not None:
            hidden_TD, residual_TD = self._add(norms.pop(0), mixed_TD, residual_TD)
            mixed_TD = self.encoder_attn(hidden_TD, of_all)
        mixed_TD, residual_TD = context.narrowed(mixed_TD), context.narrowed(residual_TD)
        hidden_TD, residual_TD = self._add(norms.pop(0), mixed_TD, residual_TD)
        hidden_TD = self.mlp(hidden_TD, context)
        return (hidden_TD, residual_TD) if self.is_pre_norm else (self._add(norms[0], hidden_TD, residual_TD)[0], None)

    def _add(self, norm: nn.Module, mixed_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Add a part's output to the stream: the next part's input, and the stream; overwrites the output."""
        normed_TD, stream_TD = norm.add_and_norm(mixed_TD, residual_TD)  # type: ignore[operator]
        return normed_TD, stream_TD if self.is_pre_norm else normed_TD


class Stack(nn.Module):
    """Position table, layers and norms of the encoder, or of the decoder (with `sources`)."""

    def __init__(
        self,
        prefix: str,
        config: Seq2SeqConfig,
        sizes: StackConfig,
        num_rows: int,
        parallel: ParallelState,
        sources: SourceLengths | None = None,
    ) -> None:
        super().__init__()
        self.embed_positions = config.make_positions(num_rows)
        self.layernorm_embedding = LayerNorm(config.hidden_size, config.norm_eps) if config.norms_embeddings else None
        self.layers = nn.ModuleList(
            Seq2SeqLayer(f"{prefix}layers.{index}", config, sizes, parallel, sources)
            for index in range(sizes.num_layers)
        )
        self.layer_norm = LayerNorm(config.hidden_size, config.norm_eps) if config.has_final_norm else None

    def forward(
        self, embedded_TD: Tensor, rows_T: Tensor, context: ForwardContext, rotation: Rotation | None = None
    ) -> Tensor:
        """Hidden states of embedded tokens at these rows of the position table; of last tokens where it is narrowed."""
        of_all = context.of_all_tokens()
        hidden_TD = sum_rows(embedded_TD, self.embed_positions(rows_T, of_all))
        if self.layernorm_embedding is not None:
            hidden_TD = self.layernorm_embedding(hidden_TD)
        residual_TD = None
        for layer, of_layer in zip(self.layers, context.by_layer(len(self.layers)), strict=True):
            hidden_TD, residual_TD = layer(hidden_TD, residual_TD, rotation, of_layer)
        if residual_TD is not None and self.layer_norm is not None:
            return self.layer_norm.add_and_norm(hidden_TD, residual_TD)[0]
        return hidden_TD if self.layer_norm is None else self.layer_norm(hidden_TD)

    def table(self, table: WeightTable) -> WeightTable:
        """Complete a table of the layers' weights."""
        further = {"layernorm_embedding": self.layernorm_embedding, "layer_norm": self.layer_norm}
        if isinstance(self.embed_positions, VocabEmbedding):
            further["embed_positions"] = self.embed_positions  # type: ignore[assignment]
        return {**table, **{name: Into(name) for name, module in further.items() if module is not None}}


class Seq2SeqModel(CausalLM):
    """Decoder with its LM head, and the encoder of texts beside it.

    sources: lengths of the requests' sources. cross_attentions: those of the decoder's layers.
    embedding_name, head_name: of the shared embedding's weight, and of the LM head, in checkpoints.
    """

    embedding_name: ClassVar[str] = "model.shared.weight"
    head_name: ClassVar[str] = "lm_head"
    unrotated: Tensor
    ignorable: ClassVar[tuple[str, ...]] = (
        # Other names of the shared embedding, and tables that are computed.
        r"model\.(encoder|decoder)\.embed_(tokens|positions)\.weights?",
        r"lm_head\.weight",
    )

    def __init__(self, config: Seq2SeqConfig, parallel: ParallelState) -> None:
        super().__init__()
        self.config = config
        self.sources = SourceLengths(config.max_source_positions)
        self.first_position = config.first_position
        size, num_more = config.hidden_size, config.first_position
        self.shared = self._make_embedding(parallel)
        self.encoder = self._make_encoder(parallel)
        self.decoder = Stack(
            _DECODER, config, config.decoder, config.num_positions + num_more, parallel, sources=self.sources
        )
        self.register_buffer("unrotated", torch.empty(1, 0, device="cpu"), persistent=False)
        self.lm_head = LMHead(
            config.vocab_size, size, bias=config.has_logits_bias, parallel=parallel, tied_to=self.shared
        )

    @property
    def cross_attentions(self) -> list[CrossAttention]:
        return [module for module in self.decoder.modules() if isinstance(module, CrossAttention)]

    def _make_embedding(self, parallel: ParallelState) -> VocabEmbedding:
        config = self.config
        if config.embedding_scale == 1.0:
            return VocabEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        return ScaledVocabEmbedding(
            config.vocab_size, config.hidden_size, scale=config.embedding_scale, parallel=parallel
        )

    def _make_encoder(self, parallel: ParallelState) -> Stack:
        config = self.config
        num_rows = config.max_source_positions + config.first_position
        return Stack(ENCODER, config, config.encoder, num_rows, parallel)

    def encode(self, token_ids_S: Tensor, context: ForwardContext) -> Tensor:
        """The encoder's output for one source, [S, D]. token_ids_S: int32."""
        rows_S = torch.arange(len(token_ids_S), dtype=torch.int32, device=token_ids_S.device) + self.first_position
        return self.encoder(self.shared(token_ids_S, context), rows_S, context)  # type: ignore[no-any-return]

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        """See `CausalLM`. Without the step input, as in a dummy step, positions count from 0."""
        of_all = context.of_all_tokens()
        rows_T = of_all.input(POSITION_IDS)
        if rows_T is None:
            rows_T = positions_T + self.first_position
        embedded_TD = self.shared(input_ids_T, of_all)
        rotation = no_rotation(self.unrotated, positions_T, embedded_TD.dtype)
        return self.decoder(embedded_TD, rows_T, context, rotation)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_LD: Tensor, context: ForwardContext) -> Tensor:
        return self.lm_head(hidden_LD, context)  # type: ignore[no-any-return]

    def compute_greedy(self, hidden_LD: Tensor, context: ForwardContext) -> ChosenTokens | None:
        return self.lm_head.compute_greedy(hidden_LD, context)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        slots = {self.embedding_name: weight_slots(self.shared, None)["weight"]}
        if self.lm_head.bias is not None:
            slots[f"{self.head_name}.bias"] = weight_slots(self.lm_head, None)["bias"]
        for prefix, stack, table, sizes in self._stacks():
            found = expand_table(stack, table, sizes.num_layers)
            slots |= {prefix + name: slot for name, slot in found.items()}
        return slots

    def tied_weights(self) -> Mapping[str, str]:
        return {f"{self.head_name}.weight": self.embedding_name}

    def _stacks(self) -> list[tuple[str, Stack, WeightTable, StackConfig]]:
        encoder, decoder = self.encoder, self.decoder
        return [
            (ENCODER, encoder, encoder.table(_ENCODER_WEIGHTS), self.config.encoder),
            (_DECODER, decoder, decoder.table(_DECODER_WEIGHTS), self.config.decoder),
        ]
