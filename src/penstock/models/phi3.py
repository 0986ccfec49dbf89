"""Phi-3 and Phi-4 (Abdin et al. 2024, https://arxiv.org/abs/2404.14219)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.config import ModelConfig
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DECODER_WEIGHTS, DecoderConfig, DecoderForCausalLM, plain_decoder
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

# Default of an absent field.
_DEFAULT_ORIGINAL_LENGTH = 4096
# Names of longrope in early configurations.
_LONGROPE_NAMES = ("su", "yarn")
_FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


class Phi3ForCausalLM(DecoderForCausalLM):
    """The plain decoder with fused QKV and fused gate and up projections in the checkpoint.

    Rotary embedding may be partial, and scaled by longrope.
    """

    weight_table: ClassVar[WeightTable] = {
        **{name: into for name, into in DECODER_WEIGHTS.items() if not name.endswith(_FUSED)},
        "model.layers.*.self_attn.qkv_proj": Into("model.layers.*.self_attn.qkv_proj"),
        "model.layers.*.mlp.gate_up_proj": Into("model.layers.*.mlp.gate_up_proj"),
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        fields.refuse_flags("attention_bias", "mlp_bias", "lm_head_bias")
        config = DecoderConfig.read(fields, rope=lambda head_size: _read_rope(fields, head_size))
        window = fields.optional_integer("sliding_window")
        super().__init__(config, parallel, plain_decoder(config, parallel, windows=[window] * config.num_layers))


def _read_rope(fields: ConfigFields, head_size: int) -> RopeParameters:
    content = dict(fields.hf_config)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(content.get(name), Mapping):
            content[name] = _with_today_s_name(content[name])
    if "original_max_position_embeddings" not in (content.get("rope_scaling") or content.get("rope_parameters") or {}):
        content.setdefault("original_max_position_embeddings", _DEFAULT_ORIGINAL_LENGTH)
    return read_rope_parameters(content, head_size=head_size, num_positions=fields.num_positions, may_be_partial=True)


def _with_today_s_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    rope_type = settings.get("rope_type") or settings.get("type")
    return {**settings, "rope_type": "longrope"} if rope_type in _LONGROPE_NAMES else dict(settings)
