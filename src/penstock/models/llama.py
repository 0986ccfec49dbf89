"""Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971) and Mistral (Jiang et al. 2023, arXiv:2310.06825)."""

from __future__ import annotations

import re

from penstock.config import ModelConfig
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, plain_decoder
from penstock.parallel import ParallelState

# EXAONE 3 is this decoder under other names, which Transformers writes again when it saves one.
_EXAONE_NAMES = (
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.h\.", "model.layers."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.attention\.", ".self_attn."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
    (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)


class LlamaForCausalLM(DecoderForCausalLM):
    """The plain decoder. `attention_bias` and `mlp_bias` add biases to the attention's and the MLP's projections."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        attention_bias = fields.flag("attention_bias", default=False)
        mlp_bias = fields.flag("mlp_bias", default=False)
        model = plain_decoder(config, parallel, qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=mlp_bias)
        super().__init__(config, parallel, model)

    def checkpoint_name(self, name: str) -> str:
        """See `CausalLM`. Checkpoints of EXAONE 3 have names of their own."""
        if name.startswith("transformer."):
            for pattern, replacement in _EXAONE_NAMES:
                name = re.sub(pattern, replacement, name)
        return name


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
