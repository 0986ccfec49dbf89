"""Jamba (AI21 2024, https://arxiv.org/abs/2403.19887): Mamba, with attention and experts in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from penstock.config import ModelConfig
from penstock.layers.recurrence.selective_scan import SelectiveScan, SelectiveSizes
from penstock.models.bamba import common_weights
from penstock.models.config_fields import FULL, ConfigFields
from penstock.models.decoder import ATTENTION_WEIGHTS, DecoderConfig, DecoderLayer, DecoderModel, SelfAttention
from penstock.models.mamba_fields import STATE_SPACE, read_step_rank, selective_weights
from penstock.models.mixtures import ExpertNames, MixtureForCausalLM, mixtures, read_routing
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

_NORMS = ("dt", "steps"), ("b", "keys"), ("c", "keys")


class JambaForCausalLM(MixtureForCausalLM):
    """State-space layers of Mamba, attention without positions in some; each before an MLP, or experts in some."""

    weight_table: ClassVar[WeightTable] = common_weights()
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = {
        FULL: ATTENTION_WEIGHTS,
        STATE_SPACE: {
            **selective_weights("model.layers.*.mamba", "model.layers.*.self_attn"),
            **{
                f"model.layers.*.mamba.{name}_layernorm": Into(f"model.layers.*.self_attn.{of}_norm", shard=name)
                for name, of in _NORMS
            },
        },
    }
    expert_names: ClassVar[ExpertNames] = ExpertNames(
        "feed_forward", router="router", stacked_block="feed_forward", stacked_router="router"
    )

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        num_layers, hidden_size = config.num_layers, config.hidden_size
        with_attention = _layers(fields, "attn_layer", num_layers, default=(8, 4))
        kinds = [FULL if layer in with_attention else STATE_SPACE for layer in range(num_layers)]
        sizes = SelectiveSizes(
            inner_size=fields.integer("mamba_expand", default=2) * hidden_size,
            state_size=fields.integer("mamba_d_state", default=16),
            step_rank=read_step_rank(fields, "mamba_dt_rank", hidden_size),
            kernel_size=fields.integer("mamba_d_conv", default=4),
            bias=fields.flag("mamba_proj_bias", default=False),
            convolution_bias=fields.flag("mamba_conv_bias", default=True),
            norm_eps=config.norm_eps,
        )
        fields.choice("hidden_act", ("silu", "swish"), "silu")
        layers, routing, moe = [], None, None
        if fields.integer("num_experts", default=16) > 1:
            layers = _layers(fields, "expert_layer", num_layers, default=(2, 1))
            routing = read_routing(fields, normalizes=False)
            moe = mixtures(config, routing, config.intermediate_size, parallel, layers)

        def layer(index: int) -> DecoderLayer:
            if kinds[index] == FULL:
                mixer: SelfAttention | SelectiveScan = SelfAttention(
                    config, index, parallel, qkv_bias=False, output_bias=False
                )
            else:
                mixer = SelectiveScan(hidden_size, sizes, name=f"model.layers.{index}.mamba", parallel=parallel)
            return DecoderLayer(config, mixer, parallel, moe=None if moe is None else moe(index))

        model = DecoderModel(config, parallel, layer, ropes=[None] * num_layers)
        super().__init__(config, parallel, model, layers, routing)
        self.layer_kinds = kinds


def _layers(fields: ConfigFields, name: str, num_layers: int, *, default: tuple[int, int]) -> list[int]:
    """Every layer in so many, of the fields `…_period` and `…_offset`. Raises UnsupportedFeature for none at all."""
    period = fields.integer(f"{name}_period", default=default[0])
    offset = fields.count(f"{name}_offset", default=default[1])
    if offset >= period:
        raise fields.unsupported(f"{name}_offset", offset, f"numbers below {name}_period={period}")
    return [layer for layer in range(num_layers) if layer % period == offset]
