"""Qwen2 and Qwen2.5 (Qwen team 2024, https://arxiv.org/abs/2407.10671)."""

from __future__ import annotations

from penstock.config import ModelConfig
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, plain_decoder
from penstock.models.qwen_windows import read_qwen_windows
from penstock.parallel import ParallelState


class Qwen2ForCausalLM(DecoderForCausalLM):
    """The plain decoder with QKV biases, and sliding windows in some layers if enabled."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        windows = read_qwen_windows(fields, config.num_layers)
        super().__init__(config, parallel, plain_decoder(config, parallel, qkv_bias=True, windows=windows))
