"""LFM2, dense and with experts (Liquid AI 2025, https://arxiv.org/abs/2511.23404).

Short convolutions in most layers, attention in the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from penstock.config import ModelConfig
from penstock.layers.experts import SIGMOID, MoE
from penstock.layers.norm import QueryKeyNorm
from penstock.layers.recurrence.short_convolution import ShortConvolution
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.models.config_fields import FULL, ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderLayer, DecoderModel, SelfAttention
from penstock.models.mixtures import ExpertNames, MixtureForCausalLM, mixtures, read_routing
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

CONVOLUTION = "conv"
_THETA = 1_000_000.0
_DEFAULT_KERNEL_SIZE = 3
_MLP_NAMES = ExpertNames("feed_forward", gate_proj="w1", up_proj="w3", down_proj="w2", stacked_block="feed_forward")
_WEIGHTS: WeightTable = {
    "model.embed_tokens": Into("model.embed_tokens"),
    "model.layers.*.operator_norm": Into("model.layers.*.input_layernorm"),
    "model.layers.*.ffn_norm": Into("model.layers.*.post_attention_layernorm"),
    "model.layers.*.feed_forward.w1": Into("model.layers.*.mlp.gate_up_proj", shard="gate"),
    "model.layers.*.feed_forward.w3": Into("model.layers.*.mlp.gate_up_proj", shard="up"),
    "model.layers.*.feed_forward.w2": Into("model.layers.*.mlp.down_proj"),
    "model.embedding_norm": Into("model.norm"),
    "lm_head": Into("lm_head"),
}
_WEIGHTS_OF_KINDS: Mapping[str, WeightTable] = {
    FULL: {
        "model.layers.*.self_attn.q_proj": Into("model.layers.*.self_attn.qkv_proj", shard="q"),
        "model.layers.*.self_attn.k_proj": Into("model.layers.*.self_attn.qkv_proj", shard="k"),
        "model.layers.*.self_attn.v_proj": Into("model.layers.*.self_attn.qkv_proj", shard="v"),
        "model.layers.*.self_attn.out_proj": Into("model.layers.*.self_attn.o_proj"),
        "model.layers.*.self_attn.q_layernorm": Into("model.layers.*.self_attn.query_key_norm", shard="q"),
        "model.layers.*.self_attn.k_layernorm": Into("model.layers.*.self_attn.query_key_norm", shard="k"),
    },
    CONVOLUTION: {
        "model.layers.*.conv.in_proj": Into("model.layers.*.self_attn.in_proj"),
        "model.layers.*.conv.conv": Into("model.layers.*.self_attn.conv"),
        "model.layers.*.conv.out_proj": Into("model.layers.*.self_attn.out_proj"),
    },
}


class Lfm2ForCausalLM(DecoderForCausalLM):
    """Short convolutions in most layers; norms on query and key heads in those with attention."""

    weight_table: ClassVar[WeightTable] = _WEIGHTS
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = _WEIGHTS_OF_KINDS

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = _read_config(fields, intermediate_size=_read_intermediate_size(fields))
        kinds = _read_kinds(fields, config.num_layers, fields.layer_numbers("full_attn_idxs", config.num_layers))
        super().__init__(config, parallel, _model(fields, config, kinds, parallel))
        self.layer_kinds = kinds


class Lfm2MoeForCausalLM(MixtureForCausalLM):
    """LFM2 with experts after the first layers, chosen by sigmoids with a correction."""

    weight_table: ClassVar[WeightTable] = _WEIGHTS
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = _WEIGHTS_OF_KINDS
    expert_names: ClassVar[ExpertNames] = _MLP_NAMES

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = _read_config(fields, intermediate_size=None)
        kinds = _read_kinds(fields, config.num_layers)
        # Transformers adds 1e-6 to the sum that weights are divided by, which is one of sigmoids.
        routing = read_routing(fields, normalizes=fields.flag("norm_topk_prob", default=True))
        routing = replace(routing, scoring=SIGMOID, scale=fields.number("routed_scaling_factor", default=1.0))
        layers = list(range(fields.count("num_dense_layers", default=2), config.num_layers))
        has_correction = fields.flag("use_expert_bias", default=True)
        size = fields.integer("moe_intermediate_size")
        moe = mixtures(config, routing, size, parallel, layers, has_correction=has_correction)
        super().__init__(config, parallel, _model(fields, config, kinds, parallel, moe), layers, routing)
        self.layer_kinds = kinds

    def checkpoint_name(self, name: str) -> str:
        return name.replace(".feed_forward.expert_bias", ".feed_forward.gate.e_score_correction_bias")


def _model(
    fields: ConfigFields,
    config: DecoderConfig,
    kinds: Sequence[str],
    parallel: ParallelState,
    moe: Callable[[int], MoE | None] | None = None,
) -> DecoderModel:
    """Build the model. moe: as of `plain_decoder`."""
    bias, kernel_size = fields.flag("conv_bias", default=False), fields.integer("conv_L_cache", _DEFAULT_KERNEL_SIZE)

    def layer(index: int) -> DecoderLayer:
        if kinds[index] == FULL:
            mixer: SelfAttention | ShortConvolution = SelfAttention(
                config, index, parallel, qkv_bias=False, output_bias=False, query_key_norm=QueryKeyNorm
            )
        else:
            name = f"model.layers.{index}.conv"
            mixer = ShortConvolution(config.hidden_size, kernel_size, bias=bias, name=name, parallel=parallel)
        return DecoderLayer(config, mixer, parallel, moe=None if moe is None else moe(index))

    return DecoderModel(config, parallel, layer)


def _read_config(fields: ConfigFields, intermediate_size: int | None) -> DecoderConfig:
    config = DecoderConfig.read(
        fields,
        norm_eps_field="norm_eps",
        intermediate_size=intermediate_size,
        rope=partial(_read_rope, fields),
    )
    # Early configurations have another name, which Transformers prefers.
    is_tied = fields.flag("tie_embedding", default=fields.flag("tie_word_embeddings", default=True))
    return replace(config, tie_word_embeddings=is_tied)


def _read_rope(fields: ConfigFields, head_size: int) -> RopeParameters:
    return read_rope_parameters(
        fields.hf_config, head_size=head_size, num_positions=fields.num_positions, default_theta=_THETA
    )


def _read_kinds(fields: ConfigFields, num_layers: int, attention_layers: list[int] | None = None) -> list[str]:
    """`CONVOLUTION` or `FULL` for each layer, of `layer_types`, or else of the numbers of layers with attention."""
    kinds = fields.layer_types(num_layers)
    if kinds is None:
        with_attention = range(num_layers) if attention_layers is None else attention_layers
        return [FULL if layer in with_attention else CONVOLUTION for layer in range(num_layers)]
    if not set(kinds) <= {FULL, CONVOLUTION}:
        raise fields.unsupported("layer_types", kinds, f"{FULL}, {CONVOLUTION}")
    return kinds


def _read_intermediate_size(fields: ConfigFields) -> int:
    """Size of the MLPs: two thirds of the configured one by default, times a factor, rounded up to a multiple."""
    size = fields.integer("block_ff_dim", default=fields.hf_config.get("intermediate_size"))
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(2 * size / 3)
    factor = fields.optional_number("block_ffn_dim_multiplier", default=1.0)
    if factor is not None:
        multiple = fields.integer("block_multiple_of", default=256)
        size = -(-int(factor * size) // multiple) * multiple
    return size
