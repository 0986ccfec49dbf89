"""Phi-3.5-MoE (Abdin et al. 2024, https://arxiv.org/abs/2404.14219; GRIN, Liu et al. 2024, arXiv:2409.12136)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

from penstock.config import ModelConfig
from penstock.layers.experts import SPARSEMIXER
from penstock.layers.norm import LayerNorm
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, plain_decoder
from penstock.models.mixtures import ExpertNames, MixtureForCausalLM, mixtures, read_routing
from penstock.parallel import ParallelState

# Experts of a token that SparseMixer is trained for.
_TOP_K = 2
# Defaults of absent fields.
_DEFAULT_THETA = 1000000.0
_DEFAULT_JITTER = 0.01


class PhimoeForCausalLM(MixtureForCausalLM):
    """Experts in every layer, chosen by SparseMixer; layer norms; biases in attention and LM head; longrope."""

    expert_names: ClassVar[ExpertNames] = ExpertNames("block_sparse_moe", "w1", "w3", "w2", stacked_router="router")

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        head_bias = fields.flag("lm_head_bias", default=False)
        if head_bias and fields.flag("tie_word_embeddings", default=False):
            raise fields.unsupported("lm_head_bias", True, "false where tie_word_embeddings is true")
        config = DecoderConfig.read(fields, rope=partial(_read_rope, fields))
        config = replace(config, norm=LayerNorm, lm_head_bias=head_bias)
        routing = read_routing(fields, normalizes=False)
        if routing.top_k != _TOP_K:
            raise fields.unsupported("num_experts_per_tok", routing.top_k, str(_TOP_K))
        jitter = fields.number("router_jitter_noise", default=_DEFAULT_JITTER)
        routing = replace(routing, scoring=SPARSEMIXER, jitter=jitter)
        layers, bias = list(range(config.num_layers)), fields.flag("attention_bias", default=False)
        model = plain_decoder(
            config,
            parallel,
            qkv_bias=bias,
            output_bias=bias,
            windows=[fields.optional_integer("sliding_window")] * config.num_layers,
            moe=mixtures(config, routing, config.intermediate_size, parallel, layers),
        )
        super().__init__(config, parallel, model, layers, routing)


# The name in published configurations.
PhiMoEForCausalLM = PhimoeForCausalLM


def _read_rope(fields: ConfigFields, head_size: int) -> RopeParameters:
    """Rotary embedding: plain, or longrope with factors on cosines and sines of its own."""
    rope = read_rope_parameters(
        fields.hf_config, head_size=head_size, num_positions=fields.num_positions, default_theta=_DEFAULT_THETA
    )
    if rope.rope_type == "default":
        return rope
    if rope.rope_type != "longrope":
        raise fields.unsupported("rope_type", rope.rope_type, "default, longrope")
    is_long = rope.num_positions > rope.original_max_position_embeddings
    factor = rope.number("long_mscale" if is_long else "short_mscale")
    return replace(rope, settings={**rope.settings, "attention_factor": factor})
