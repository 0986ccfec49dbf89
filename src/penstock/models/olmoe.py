"""OLMoE (Muennighoff et al. 2024, https://arxiv.org/abs/2409.02060)."""

from __future__ import annotations

from typing import ClassVar

from penstock.config import ModelConfig
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DECODER_WEIGHTS, DecoderConfig, plain_decoder
from penstock.models.mixtures import MixtureForCausalLM, mixtures, read_routing
from penstock.models.olmo2 import whole_query_key_norm
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState


class OlmoeForCausalLM(MixtureForCausalLM):
    """Experts in every layer; query and key norms over all heads."""

    weight_table: ClassVar[WeightTable] = {
        **DECODER_WEIGHTS,
        "model.layers.*.self_attn.q_norm": Into("model.layers.*.self_attn.query_key_norm.q_norm"),
        "model.layers.*.self_attn.k_norm": Into("model.layers.*.self_attn.query_key_norm.k_norm"),
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        if fields.hf_config.get("clip_qkv") is not None:
            raise fields.unsupported("clip_qkv", fields.hf_config["clip_qkv"], "null")
        routing = read_routing(fields)
        layers = list(range(config.num_layers))
        bias = fields.flag("attention_bias", default=False)
        model = plain_decoder(
            config,
            parallel,
            qkv_bias=bias,
            output_bias=bias,
            query_key_norm=whole_query_key_norm(config, parallel),
            moe=mixtures(config, routing, config.intermediate_size, parallel, layers),
        )
        super().__init__(config, parallel, model, layers, routing)
