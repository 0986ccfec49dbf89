"""Qwen3, dense (Qwen team 2025, https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from typing import ClassVar

from penstock.config import ModelConfig
from penstock.layers.norm import QueryKeyNorm
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DECODER_WEIGHTS, DecoderConfig, DecoderForCausalLM, plain_decoder
from penstock.models.qwen_windows import read_qwen_windows
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

# Default of an absent `head_dim`, independent of the hidden size.
_DEFAULT_HEAD_SIZE = 128


class Qwen3ForCausalLM(DecoderForCausalLM):
    """The plain decoder with query and key norms; head_dim is independent of the hidden size."""

    weight_table: ClassVar[WeightTable] = {
        **DECODER_WEIGHTS,
        "model.layers.*.self_attn.q_norm": Into("model.layers.*.self_attn.query_key_norm", shard="q"),
        "model.layers.*.self_attn.k_norm": Into("model.layers.*.self_attn.query_key_norm", shard="k"),
    }

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields, default_head_size=_DEFAULT_HEAD_SIZE)
        bias = fields.flag("attention_bias", default=False)
        windows = read_qwen_windows(fields, config.num_layers)
        model = plain_decoder(
            config, parallel, qkv_bias=bias, output_bias=bias, windows=windows, query_key_norm=QueryKeyNorm
        )
        super().__init__(config, parallel, model)
