"""T5 (Raffel et al. 2019, https://arxiv.org/abs/1910.10683), T5 1.1, Flan-T5, mT5 and umT5.

Suffixes: T tokens of the step, S positions of a source, H heads, D hidden size or head size, X concatenated heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.attention import ForwardContext, LayerAttention, SourceLengths
from penstock.config import ModelConfig
from penstock.kernels.activation import ACTIVATIONS, GATED_ACTIVATIONS
from penstock.layers.attention import Attention
from penstock.layers.cross_attention import CrossAttention
from penstock.layers.distance_biases import CausalBiases, TwoSidedBiases
from penstock.layers.embedding import LMHead, VocabEmbedding
from penstock.layers.mlp import GatedMLP, PlainMLP
from penstock.layers.norm import RMSNorm
from penstock.layers.parallel_linear import QKVParallelLinear, RowParallelLinear
from penstock.models.config_fields import ConfigFields
from penstock.models.encoder_decoder import EncoderDecoder, EncoderDecoderLayer, run_layers
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

_GATED = "gated-"


@dataclass(frozen=True, slots=True)
class T5Config:
    """Parameters of both stacks.

    is_gated: of the MLP. scales_logits: hidden states are scaled before the LM head. has_own_biases: each layer has
    relative position biases of its own; otherwise the first one's are those of all.
    """

    vocab_size: int
    hidden_size: int
    head_size: int
    num_heads: int
    intermediate_size: int
    num_encoder_layers: int
    num_decoder_layers: int
    num_buckets: int
    max_distance: int
    activation: str
    is_gated: bool
    norm_eps: float
    scales_logits: bool
    is_tied: bool
    num_positions: int
    has_own_biases: bool

    @classmethod
    def read(cls, fields: ConfigFields, *, may_scale: bool, has_own_biases: bool) -> T5Config:
        """Raises ModelError for a missing or invalid field, UnsupportedFeature for an unsupported value."""
        fields.refuse_unsupported()
        kinds = [*ACTIVATIONS, *(_GATED + name for name in GATED_ACTIVATIONS)]
        kind = fields.choice("feed_forward_proj", kinds, default="relu")
        is_gated, activation = kind.startswith(_GATED), kind.removeprefix(_GATED)
        is_tied = fields.flag("tie_word_embeddings", default=True)
        num_layers = fields.integer("num_layers")
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("d_model"),
            head_size=fields.integer("d_kv"),
            num_heads=fields.integer("num_heads"),
            intermediate_size=fields.integer("d_ff"),
            num_encoder_layers=num_layers,
            num_decoder_layers=fields.integer("num_decoder_layers", default=num_layers),
            num_buckets=fields.integer("relative_attention_num_buckets", default=32),
            max_distance=fields.integer("relative_attention_max_distance", default=128),
            # The name of the tanh approximation is that of the exact function here.
            activation="gelu_new" if is_gated and activation == "gelu" else activation,
            is_gated=is_gated,
            norm_eps=fields.number("layer_norm_epsilon", default=1e-6),
            scales_logits=may_scale and fields.flag("scale_decoder_outputs", default=is_tied),
            is_tied=is_tied,
            num_positions=fields.num_positions,
            has_own_biases=has_own_biases,
        )


class T5Attention(nn.Module):
    """Self attention with biases by distance, which are not scaled.

    own_biases: of this layer; None for those of the first.
    """

    def __init__(
        self,
        name: str,
        config: T5Config,
        parallel: ParallelState,
        own_biases: CausalBiases | TwoSidedBiases | None,
        causal: CausalBiases | None,
    ) -> None:
        super().__init__()
        heads, self.head_size = config.num_heads, config.head_size
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            num_heads=heads,
            num_kv_heads=heads,
            head_size=config.head_size,
            bias=False,
            parallel=parallel,
        )
        if own_biases is not None:
            self.relative_bias = own_biases
        self.attn = None
        if causal is not None:
            self.attn = Attention(
                LayerAttention(
                    name,
                    num_heads=self.qkv_proj.num_heads,
                    num_kv_heads=self.qkv_proj.num_kv_heads,
                    head_size=config.head_size,
                    scale=1.0,
                    distance_biases=causal,
                )
            )
        self.o_proj = RowParallelLinear(heads * config.head_size, config.hidden_size, bias=False, parallel=parallel)

    def forward(self, hidden_TD: Tensor, positions: Any, context: ForwardContext) -> Tensor:
        """positions: the decoder's rotation of no dimension, or the encoder's biases of its first layer, [H, S, S]."""
        qkv_TX = self.qkv_proj(hidden_TD, context)
        if self.attn is not None:
            mixed_TX = self.attn.from_projection(qkv_TX, None, positions, context)
        else:
            own = getattr(self, "relative_bias", None)
            mixed_TX = self._attend_to_text(qkv_TX, positions if own is None else own(len(hidden_TD)))
        return self.o_proj(mixed_TX, context)  # type: ignore[no-any-return]

    def _attend_to_text(self, qkv_SX: Tensor, biases_HSS: Tensor) -> Tensor:
        """Attention of one text in both directions: [S, H * D]."""
        heads_HSD = qkv_SX.view(len(qkv_SX), -1, self.head_size).transpose(0, 1)
        query, key, value = heads_HSD.chunk(3, 0)
        mixed_HSD = F.scaled_dot_product_attention(query, key, value, biases_HSS.to(query.dtype), scale=1.0)
        return mixed_HSD.transpose(0, 1).flatten(1)


class T5Stack(nn.Module):
    """Layers and final norm of the encoder, or of the decoder (with `sources`)."""

    def __init__(
        self, prefix: str, config: T5Config, num_layers: int, parallel: ParallelState, sources: SourceLengths | None
    ) -> None:
        super().__init__()
        self._is_causal = sources is not None
        sizes = config.num_heads, config.num_buckets, config.max_distance

        def make_biases() -> CausalBiases | TwoSidedBiases:
            return TwoSidedBiases(*sizes, parallel) if sources is None else CausalBiases(*sizes, parallel)

        shared = None if config.has_own_biases else make_biases()
        if shared is not None:
            self.relative_bias = shared

        def layer(name: str) -> EncoderDecoderLayer:
            own = make_biases() if shared is None else None
            biases = own or shared
            causal = biases if isinstance(biases, CausalBiases) else None
            cross = None
            if sources is not None:
                cross = CrossAttention(
                    f"{name}.EncDecAttention",
                    config.hidden_size,
                    num_heads=config.num_heads,
                    head_size=config.head_size,
                    scale=1.0,
                    bias=False,
                    key_bias=False,
                    sources=sources,
                    parallel=parallel,
                )
            attention = T5Attention(f"{name}.SelfAttention", config, parallel, own, causal)
            norms = [RMSNorm(config.hidden_size, config.norm_eps) for _ in range(2 if sources is None else 3)]
            return EncoderDecoderLayer(attention, cross, _make_mlp(config, parallel), norms, is_pre_norm=True)

        self.layers = nn.ModuleList(layer(f"{prefix}block.{index}") for index in range(num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, hidden_TD: Tensor, rotation: Any, context: ForwardContext) -> Tensor:
        """rotation: of the decoder; not read in the encoder."""
        shared = getattr(self, "relative_bias", None)
        positions = rotation
        if not self._is_causal:
            positions = None if shared is None else shared(len(hidden_TD))
        return run_layers(self.layers, self.norm, hidden_TD, positions, context)


class T5ForConditionalGeneration(EncoderDecoder):
    """Norms before each part, no positions, biases by distance."""

    embedding_name = "shared.weight"
    ignorable: ClassVar[tuple[str, ...]] = (
        r"(encoder|decoder)\.embed_tokens\.weight",
        # Of old checkpoints, where it is not read.
        r"decoder\.block\.\d+\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        r"lm_head\.weight",
    )
    may_scale: ClassVar[bool] = True
    has_own_biases: ClassVar[bool] = False

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = T5Config.read(fields, may_scale=self.may_scale, has_own_biases=self.has_own_biases)
        shared = VocabEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        tied_to = shared if config.is_tied else None
        head = LMHead(config.vocab_size, config.hidden_size, parallel=parallel, tied_to=tied_to)
        super().__init__(config.num_positions, shared, head)
        self.config = config
        self.encoder_heads = config.num_heads
        self.encoder = T5Stack("encoder.", config, config.num_encoder_layers, parallel, None)
        self.decoder = T5Stack("decoder.", config, config.num_decoder_layers, parallel, self.sources)

    def encode(self, source: Tensor, context: ForwardContext) -> Tensor:
        return self.encoder(self.shared(source, context), None, context)  # type: ignore[no-any-return]

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        embedded_TD = self.shared(input_ids_T, context.of_all_tokens())
        rotation = self.no_rotation(positions_T, embedded_TD.dtype)
        hidden_TD: Tensor = self.decoder(embedded_TD, rotation, context)
        return hidden_TD.mul_(self.config.hidden_size**-0.5) if self.config.scales_logits else hidden_TD

    def stacks(self) -> list[tuple[str, nn.Module, WeightTable, int]]:
        config = self.config
        return [
            ("encoder.", self.encoder, _weights(config, is_decoder=False), config.num_encoder_layers),
            ("decoder.", self.decoder, _weights(config, is_decoder=True), config.num_decoder_layers),
        ]


class MT5ForConditionalGeneration(T5ForConditionalGeneration):
    may_scale = False


class UMT5ForConditionalGeneration(T5ForConditionalGeneration):
    has_own_biases = True


def _make_mlp(config: T5Config, parallel: ParallelState) -> nn.Module:
    sizes = config.hidden_size, config.intermediate_size
    make = GatedMLP if config.is_gated else PlainMLP
    return make(*sizes, activation=config.activation, bias=False, parallel=parallel)


def _weights(config: T5Config, *, is_decoder: bool) -> WeightTable:
    """Weights of the encoder or the decoder."""
    layer, mlp = "block.*.layer", f"block.*.layer.{1 + is_decoder}"
    attention, of_mlp = f"{layer}.0.SelfAttention", f"{mlp}.DenseReluDense"
    table: dict[str, Into] = {
        **{f"{attention}.{name}": Into("layers.*.self_attn.qkv_proj", shard=name) for name in "qkv"},
        f"{attention}.o": Into("layers.*.self_attn.o_proj"),
        f"{layer}.0.layer_norm": Into("layers.*.norms.0"),
        f"{mlp}.layer_norm": Into(f"layers.*.norms.{1 + is_decoder}"),
        f"{of_mlp}.wo": Into("layers.*.mlp.down_proj"),
        "final_layer_norm": Into("norm"),
    }
    if config.is_gated:
        table[f"{of_mlp}.wi_0"] = Into("layers.*.mlp.gate_up_proj", shard="gate")
        table[f"{of_mlp}.wi_1"] = Into("layers.*.mlp.gate_up_proj", shard="up")
    else:
        table[f"{of_mlp}.wi"] = Into("layers.*.mlp.up_proj")
    if is_decoder:
        cross = f"{layer}.1.EncDecAttention"
        table |= {f"{cross}.{name}": Into(f"layers.*.encoder_attn.{name}_proj") for name in "qkvo"}
        table[f"{layer}.1.layer_norm"] = Into("layers.*.norms.1")
    if config.has_own_biases:
        table[f"{attention}.relative_attention_bias"] = Into("layers.*.self_attn.relative_bias")
    else:
        table["block.0.layer.0.SelfAttention.relative_attention_bias"] = Into("relative_bias")
    return table
