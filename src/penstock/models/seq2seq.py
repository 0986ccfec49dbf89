"""Encoder and decoder of sequence-to-sequence models (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

A family's own file reads its configuration.
Suffixes: T tokens of the step, S positions of a source, L logits rows, D hidden size, X concatenated heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext, LayerAttention, SourceLengths
from penstock.kernels.embedding import embedding
from penstock.kernels.rotary import Rotation
from penstock.kernels.rows import sum_rows
from penstock.layers.attention import Attention
from penstock.layers.cross_attention import CrossAttention
from penstock.layers.embedding import POSITION_IDS, LMHead, ScaledVocabEmbedding, VocabEmbedding
from penstock.layers.mlp import PlainMLP
from penstock.layers.norm import LayerNorm
from penstock.layers.parallel_linear import QKVParallelLinear, RowParallelLinear
from penstock.layers.weights import Shard, WeightSlot
from penstock.models.encoder_decoder import EncoderDecoder, EncoderDecoderLayer, run_layers
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

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


def make_layer(
    name: str, config: Seq2SeqConfig, sizes: StackConfig, parallel: ParallelState, sources: SourceLengths | None
) -> EncoderDecoderLayer:
    """Make a layer of the encoder, or of the decoder (with `sources`)."""
    size, head_size, is_causal = config.hidden_size, config.hidden_size // sizes.num_heads, sources is not None
    encoder_attn = None
    if sources is not None:
        encoder_attn = CrossAttention(
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
    return EncoderDecoderLayer(
        SelfAttention(f"{name}.self_attn", config, sizes.num_heads, parallel, is_causal=is_causal),
        encoder_attn,
        PlainMLP(size, sizes.intermediate_size, activation=config.activation, parallel=parallel),
        [LayerNorm(size, config.norm_eps) for _ in range(2 + is_causal)],
        is_pre_norm=config.is_pre_norm,
    )


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
            make_layer(f"{prefix}layers.{index}", config, sizes, parallel, sources) for index in range(sizes.num_layers)
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
        return run_layers(self.layers, self.layer_norm, hidden_TD, rotation, context)

    def table(self, table: WeightTable) -> WeightTable:
        """Complete a table of the layers' weights."""
        further = {"layernorm_embedding": self.layernorm_embedding, "layer_norm": self.layer_norm}
        if isinstance(self.embed_positions, VocabEmbedding):
            further["embed_positions"] = self.embed_positions  # type: ignore[assignment]
        return {**table, **{name: Into(name) for name, module in further.items() if module is not None}}


class Seq2SeqModel(EncoderDecoder):
    """Model with the layers of this file, and an encoder of texts."""

    ignorable: ClassVar[tuple[str, ...]] = (
        # Other names of the shared embedding, and tables that are computed.
        r"model\.(encoder|decoder)\.embed_(tokens|positions)\.weights?",
        r"lm_head\.weight",
    )

    def __init__(self, config: Seq2SeqConfig, parallel: ParallelState) -> None:
        size, vocab_size = config.hidden_size, config.vocab_size
        shared = VocabEmbedding(vocab_size, size, parallel=parallel)
        if config.embedding_scale != 1.0:
            shared = ScaledVocabEmbedding(vocab_size, size, scale=config.embedding_scale, parallel=parallel)
        head = LMHead(vocab_size, size, bias=config.has_logits_bias, parallel=parallel, tied_to=shared)
        super().__init__(config.max_source_positions, shared, head)
        self.config = config
        self.first_position = config.first_position
        self.encoder = self._make_encoder(parallel)
        num_rows = config.num_positions + config.first_position
        self.decoder = Stack(_DECODER, config, config.decoder, num_rows, parallel, sources=self.sources)

    def encode(self, source: Tensor, context: ForwardContext) -> Tensor:
        rows_S = torch.arange(len(source), dtype=torch.int32, device=source.device) + self.first_position
        return self.encoder(self.shared(source, context), rows_S, context)  # type: ignore[no-any-return]

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        """See `CausalLM`. Without the step input, as in a dummy step, positions count from 0."""
        of_all = context.of_all_tokens()
        rows_T = of_all.input(POSITION_IDS)
        if rows_T is None:
            rows_T = positions_T + self.first_position
        embedded_TD = self.shared(input_ids_T, of_all)
        rotation = self.no_rotation(positions_T, embedded_TD.dtype)
        return self.decoder(embedded_TD, rows_T, context, rotation)  # type: ignore[no-any-return]

    def stacks(self) -> list[tuple[str, nn.Module, WeightTable, int]]:
        encoder, decoder, config = self.encoder, self.decoder, self.config
        return [
            (ENCODER, encoder, encoder.table(_ENCODER_WEIGHTS), config.encoder.num_layers),
            (_DECODER, decoder, decoder.table(_DECODER_WEIGHTS), config.decoder.num_layers),
        ]

    def _make_encoder(self, parallel: ParallelState) -> Stack:
        config = self.config
        num_rows = config.max_source_positions + config.first_position
        return Stack(ENCODER, config, config.encoder, num_rows, parallel)
