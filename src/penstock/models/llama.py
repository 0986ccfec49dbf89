"""Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971) and the many models with its architecture."""

from __future__ import annotations

from penstock.config import ModelConfig
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, plain_decoder
from penstock.parallel import ParallelState


class LlamaForCausalLM(DecoderForCausalLM):
    """The plain decoder. `attention_bias` and `mlp_bias` add biases to the attention's and the MLP's projections."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        attention_bias = fields.flag("attention_bias", default=False)
        mlp_bias = fields.flag("mlp_bias", default=False)
        model = plain_decoder(config, parallel, qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=mlp_bias)
        super().__init__(config, parallel, model)
