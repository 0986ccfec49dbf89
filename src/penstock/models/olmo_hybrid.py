"""Olmo hybrid (Ai2 2026, https://huggingface.co/allenai/Olmo-Hybrid-7B): gated DeltaNets between attention layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from penstock.checkpoints.context_length import rope_settings
from penstock.config import ModelConfig
from penstock.layers.norm import RMSNormRoundedLast
from penstock.layers.recurrence.gated_delta import DeltaSizes, GatedDelta, one_by_one
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.models.config_fields import FULL, LINEAR, ConfigFields, read_layer_kinds
from penstock.models.decoder import (
    COMMON_WEIGHTS,
    DecoderConfig,
    DecoderForCausalLM,
    DecoderLayer,
    DecoderModel,
    SelfAttention,
)
from penstock.models.delta_fields import DEFAULT_NUM_TAPS, SplitConvolutions, checked
from penstock.models.olmo2 import Olmo2ForCausalLM, Olmo2Layer, whole_query_key_norm
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

# Of the norms of DeltaNets, whatever the other norms have.
_DELTA_NORM_EPS = 1e-5
_DEFAULT_INTERVAL = 4
_THEIRS, _OURS = "model.layers.*.linear_attn", "model.layers.*.self_attn"
_INPUT_NORM = "model.layers.*.input_layernorm"
_PROJECTIONS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "z"}
_OF_HEADS = {"b_proj": "b", "a_proj": "a"}
_DELTA_WEIGHTS: WeightTable = {
    _INPUT_NORM: Into(_INPUT_NORM),
    _THEIRS: Into(_OURS),
    **{f"{_THEIRS}.{name}": Into(f"{_OURS}.in_proj", shard=shard) for name, shard in _PROJECTIONS.items()},
    **{f"{_THEIRS}.{name}": Into(f"{_OURS}.head_proj", shard=shard) for name, shard in _OF_HEADS.items()},
    f"{_THEIRS}.conv1d": Into(f"{_OURS}.conv1d"),
    f"{_THEIRS}.o_norm": Into(f"{_OURS}.norm"),
    f"{_THEIRS}.o_proj": Into(f"{_OURS}.out_proj"),
}
# Names of norms in published checkpoints.
_PUBLISHED = {".attention_layer_norm.": ".input_layernorm.", ".feedforward_layer_norm.": ".post_attention_layernorm."}


class OlmoHybridForCausalLM(DecoderForCausalLM):
    """OLMo 2's layers with attention, without positions in published models, between pre-norm gated DeltaNets."""

    weight_table: ClassVar[WeightTable] = {name: into for name, into in COMMON_WEIGHTS.items() if name != _INPUT_NORM}
    weights_of_kinds: ClassVar[Mapping[str, WeightTable]] = {
        FULL: {name: into for name, into in Olmo2ForCausalLM.weight_table.items() if name not in COMMON_WEIGHTS},
        LINEAR: _DELTA_WEIGHTS,
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields, rope=lambda head_size: _read_rope(fields, head_size))
        kinds = _read_kinds(fields, config.num_layers)
        sizes = _read_sizes(fields, config)
        bias = fields.flag("attention_bias", default=False)
        config = replace(config, norm=RMSNormRoundedLast)

        def layer(index: int) -> nn.Module:
            if kinds[index] == LINEAR:
                name = f"model.layers.{index}.linear_attn"
                mixer = GatedDelta(sizes, config.hidden_size, name, parallel, arrangement=one_by_one)
                return DecoderLayer(config, mixer, parallel)
            norm = whole_query_key_norm(config, parallel)
            attention = SelfAttention(config, index, parallel, qkv_bias=bias, output_bias=bias, query_key_norm=norm)
            return Olmo2Layer(config, attention, parallel)

        super().__init__(config, parallel, DecoderModel(config, parallel, layer))
        self.layer_kinds = kinds
        self._convolutions = SplitConvolutions()

    def pieces(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for own_name, piece in super().pieces(name, tensor):
            yield from self._convolutions.joined(own_name, piece)

    def joins(self, name: str) -> bool:
        return self._convolutions.has(self.checkpoint_name(name))

    def checkpoint_name(self, name: str) -> str:
        for published, own in _PUBLISHED.items():
            name = name.replace(published, own)
        return name


def _read_rope(fields: ConfigFields, head_size: int) -> RopeParameters | None:
    """Rotary embedding; None for a base of null, as in published models."""
    settings = rope_settings(fields.hf_config)
    if isinstance(settings, Mapping) and settings.get("rope_theta", 0) is None:
        return None
    return read_rope_parameters(fields.hf_config, head_size=head_size, num_positions=fields.num_positions)


def _read_kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    default = [LINEAR if (layer + 1) % _DEFAULT_INTERVAL else FULL for layer in range(num_layers)]
    if FULL not in default:
        default[-1] = FULL
    return read_layer_kinds(fields, default, allowed=(FULL, LINEAR))


def _read_sizes(fields: ConfigFields, config: DecoderConfig) -> DeltaSizes:
    num_keys = fields.optional_integer("linear_num_key_heads") or config.num_heads
    num_values = fields.optional_integer("linear_num_value_heads") or config.num_heads
    key_size = fields.optional_integer("linear_key_head_dim") or int(0.75 * config.hidden_size / num_keys)
    value_size = fields.optional_integer("linear_value_head_dim") or 2 * key_size
    beta_scale = 2.0 if fields.flag("linear_allow_neg_eigval", default=True) else 1.0
    return checked(
        fields,
        DeltaSizes(
            num_key_heads=num_keys,
            num_value_heads=num_values,
            key_size=key_size,
            value_size=value_size,
            num_taps=fields.integer("linear_conv_kernel_dim", default=DEFAULT_NUM_TAPS),
            norm_eps=_DELTA_NORM_EPS,
            beta_scale=beta_scale,
        ),
    )
