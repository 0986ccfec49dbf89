"""Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971) and Mistral (Jiang et al. 2023, arXiv:2310.06825)."""

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


# Default of an absent `sliding_window`; null means full attention.
_DEFAULT_WINDOW = 4096


class MistralForCausalLM(DecoderForCausalLM):
    """The plain decoder, with one `sliding_window` for all layers, or full attention if that is null."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        window = fields.optional_integer("sliding_window", default=_DEFAULT_WINDOW)
        if fields.layer_types(config.num_layers) is not None:
            raise fields.unsupported("layer_types", fields.hf_config["layer_types"], "null: all layers are alike")
        super().__init__(config, parallel, plain_decoder(config, parallel, windows=[window] * config.num_layers))
