"""HunYuan V1, dense and with experts (Tencent 2025, https://github.com/Tencent-Hunyuan/Hunyuan-A13B)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from penstock.config import ModelConfig
from penstock.layers.norm import QueryKeyNormAfterRotation
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DECODER_WEIGHTS, DecoderConfig, DecoderForCausalLM, plain_decoder
from penstock.models.mixtures import ExpertNames, MixtureForCausalLM, mixtures, read_routing
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

_QUERY_KEY_NORMS: WeightTable = {
    "model.layers.*.self_attn.query_layernorm": Into("model.layers.*.self_attn.query_key_norm", shard="q"),
    "model.layers.*.self_attn.key_layernorm": Into("model.layers.*.self_attn.query_key_norm", shard="k"),
}
# Fields of published configurations that say how other models of this maker differ, with the value implemented here.
_FIXED = {
    "use_qk_norm": True,
    "use_cla": False,
    "use_mla": False,
    "use_rotary_pos_emb": True,
    "position_embedding_xdrope": False,
    "norm_type": "rms",
    "mlp_bias": False,
}
_FIXED_OF_MIXTURES = {
    "num_shared_expert": 1,
    "use_mixed_mlp_moe": True,
    "moe_layer_num_skipped": 0,
    "norm_topk_prob": True,
    "group_limited_greedy": False,
}
# Fields that may be lists with a number for each layer.
_OF_LAYERS = ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    """The plain decoder with query and key norms after rotary embedding."""

    weight_table: ClassVar[WeightTable] = {**DECODER_WEIGHTS, **_QUERY_KEY_NORMS}

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config, bias = _read_config(fields)
        norm = QueryKeyNormAfterRotation
        model = plain_decoder(config, parallel, qkv_bias=bias, output_bias=bias, query_key_norm=norm)
        super().__init__(config, parallel, model)


class HunYuanMoEV1ForCausalLM(MixtureForCausalLM):
    """Hunyuan with experts in every layer, whose weights are normalised, and a shared expert."""

    weight_table: ClassVar[WeightTable] = HunYuanDenseV1ForCausalLM.weight_table
    expert_names: ClassVar[ExpertNames] = ExpertNames(router="gate.wg", shared="shared_mlp", stacked_router="gate.wg")
    has_shared = True

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = _same_in_all_layers(ConfigFields(model_config))
        config, bias = _read_config(fields)
        size = config.intermediate_size
        fields.refuse_others({**_FIXED_OF_MIXTURES, "moe_intermediate_size": size})
        routing = read_routing(fields, normalizes=True, of_token="moe_topk")
        layers = list(range(config.num_layers))
        model = plain_decoder(
            config,
            parallel,
            qkv_bias=bias,
            output_bias=bias,
            query_key_norm=QueryKeyNormAfterRotation,
            moe=mixtures(config, routing, size, parallel, layers, shared_size=size),
        )
        super().__init__(config, parallel, model, layers, routing)


def _read_config(fields: ConfigFields) -> tuple[DecoderConfig, bool]:
    """Read the layers' parameters, and whether projections of attention have biases."""
    fields.refuse_others(_FIXED)
    config = DecoderConfig.read(fields, rope=partial(_read_rope, fields))
    return config, fields.flag("attention_bias", default=False)


def _read_rope(fields: ConfigFields, head_size: int) -> RopeParameters:
    """Rotary embedding. "dynamic" with `alpha` has one base for all lengths: theta * alpha^(R / (R - 2))."""
    rope = read_rope_parameters(fields.hf_config, head_size=head_size, num_positions=fields.num_positions)
    if rope.rope_type != "dynamic" or not rope.settings.get("alpha"):
        return rope
    stretch = rope.number("alpha") ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return replace(rope, rope_type="default", theta=rope.theta * stretch)


def _same_in_all_layers(fields: ConfigFields) -> ConfigFields:
    """Fields with one number where a list has the same for each layer. Raises UnsupportedFeature for other lists."""
    changed: dict[str, Any] = {}
    for name in _OF_LAYERS:
        value = fields.hf_config.get(name)
        if isinstance(value, list):
            if len(set(map(repr, value))) != 1:
                raise fields.unsupported(name, value, "one number, the same for all layers")
            changed[name] = value[0]
    return ConfigFields(replace(fields.model_config, hf_config={**fields.hf_config, **changed}))
