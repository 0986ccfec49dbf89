"""Bamba (IBM and others 2024, https://huggingface.co/blog/bamba): Mamba 2, with attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from penstock.config import ModelConfig
from penstock.layers.recurrence.state_space import StateSpaceMixer
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.models.config_fields import FULL, ConfigFields
from penstock.models.decoder import (
    ATTENTION_WEIGHTS,
    COMMON_WEIGHTS,
    DecoderConfig,
    DecoderForCausalLM,
    DecoderLayer,
    DecoderModel,
    SelfAttention,
)
from penstock.models.mamba_fields import STATE_SPACE, read_state_space, state_space_weights
from penstock.models.weights import WeightTable
from penstock.parallel import ParallelState

# Part of a head that rotates, whatever the configuration says.
_ROTARY_PART = 0.5
_NAMES = {
    ".pre_ff_layernorm": ".post_attention_layernorm",
    ".feed_forward.": ".mlp.",
    "model.final_layernorm": "model.norm",
}


def common_weights() -> WeightTable:
    """Weights that all layers have, under the names of Bamba and Falcon-H1."""
    table = dict(COMMON_WEIGHTS)
    for theirs, ours in _NAMES.items():
        table = {name.replace(ours, theirs): into for name, into in table.items()}
    return table


class BambaForCausalLM(DecoderForCausalLM):
    """State-space layers, and attention with rotary embedding of half a head in some, each before an MLP."""

    weight_table: ClassVar[WeightTable] = common_weights()
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = {
        FULL: ATTENTION_WEIGHTS,
        STATE_SPACE: state_space_weights("model.layers.*.mamba", "model.layers.*.self_attn"),
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields, rope=lambda head_size: _read_rope(fields, head_size))
        with_attention = fields.layer_numbers("attn_layer_indices", config.num_layers) or []
        kinds = [FULL if layer in with_attention else STATE_SPACE for layer in range(config.num_layers)]
        sizes = read_state_space(fields, config.hidden_size, config.norm_eps)
        attention_bias, mlp_bias = [fields.flag(name, default=False) for name in ("attention_bias", "mlp_bias")]

        def layer(index: int) -> DecoderLayer:
            if kinds[index] == FULL:
                mixer: SelfAttention | StateSpaceMixer = SelfAttention(
                    config, index, parallel, qkv_bias=attention_bias, output_bias=attention_bias
                )
            else:
                name = f"model.layers.{index}.mamba"
                mixer = StateSpaceMixer(config.hidden_size, sizes, name=name, parallel=parallel)
            return DecoderLayer(config, mixer, parallel, mlp_bias=mlp_bias)

        super().__init__(config, parallel, DecoderModel(config, parallel, layer))
        self.layer_kinds = kinds


def _read_rope(fields: ConfigFields, head_size: int) -> RopeParameters:
    return read_rope_parameters(
        {**fields.hf_config, "partial_rotary_factor": _ROTARY_PART},
        head_size=head_size,
        num_positions=fields.num_positions,
        may_be_partial=True,
    )
