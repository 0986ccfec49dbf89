"""Qwen2, Qwen2.5 and dense Qwen3 (Qwen team: 2024, https://arxiv.org/abs/2407.10671; 2025, arXiv:2505.09388)."""

from __future__ import annotations

from typing import ClassVar

from penstock.config import ModelConfig
from penstock.layers.norm import QueryKeyNorm
from penstock.models.config_fields import FULL, SLIDING, ConfigFields, read_layer_kinds
from penstock.models.decoder import DECODER_WEIGHTS, DecoderConfig, DecoderForCausalLM, plain_decoder
from penstock.models.weights import Into, WeightTable
from penstock.parallel import ParallelState

# Defaults of absent fields.
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28


def read_qwen_windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    """Return the window of each layer, None for full attention.

    Windows need `use_sliding_window`. Then `layer_types` names the layers, or else those from `max_window_layers` on.
    """
    window = None
    if fields.flag("use_sliding_window", default=False):
        window = fields.optional_integer("sliding_window", default=_DEFAULT_WINDOW)
    first = fields.count("max_window_layers", default=_DEFAULT_MAX_WINDOW_LAYERS)
    from_first_on = [SLIDING if window is not None and layer >= first else FULL for layer in range(num_layers)]
    kinds = read_layer_kinds(fields, default=from_first_on)
    if SLIDING in kinds and window is None:
        raise fields.unsupported("layer_types", kinds, f"{FULL} alone, unless use_sliding_window gives a window")
    return [window if kind == SLIDING else None for kind in kinds]


class Qwen2ForCausalLM(DecoderForCausalLM):
    """The plain decoder with QKV biases, and sliding windows in some layers if enabled."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields)
        windows = read_qwen_windows(fields, config.num_layers)
        super().__init__(config, parallel, plain_decoder(config, parallel, qkv_bias=True, windows=windows))


# Weights of a `QueryKeyNorm`.
QUERY_KEY_NORMS: WeightTable = {
    "model.layers.*.self_attn.q_norm": Into("model.layers.*.self_attn.query_key_norm", shard="q"),
    "model.layers.*.self_attn.k_norm": Into("model.layers.*.self_attn.query_key_norm", shard="k"),
}
# Default of an absent `head_dim`, independent of the hidden size.
_DEFAULT_HEAD_SIZE = 128


class Qwen3ForCausalLM(DecoderForCausalLM):
    """The plain decoder with query and key norms; head_dim is independent of the hidden size."""

    weight_table: ClassVar[WeightTable] = {**DECODER_WEIGHTS, **QUERY_KEY_NORMS}

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = DecoderConfig.read(fields, default_head_size=_DEFAULT_HEAD_SIZE)
        bias = fields.flag("attention_bias", default=False)
        windows = read_qwen_windows(fields, config.num_layers)
        model = plain_decoder(
            config, parallel, qkv_bias=bias, output_bias=bias, windows=windows, query_key_norm=QueryKeyNorm
        )
        super().__init__(config, parallel, model)
