"""dots.llm1 (rednote-hilab 2025, https://arxiv.org/abs/2506.05767)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from penstock.config import ModelConfig
from penstock.layers.norm import QueryKeyNorm
from penstock.models.config_fields import FULL, SLIDING, ConfigFields, read_layer_kinds, windows_of
from penstock.models.decoder import DECODER_WEIGHTS, DecoderConfig, plain_decoder
from penstock.models.glm4_moe import read_grouped_routing
from penstock.models.mixtures import SharedExpertsForCausalLM, mixtures
from penstock.models.qwen import QUERY_KEY_NORMS
from penstock.models.weights import WeightTable
from penstock.parallel import ParallelState

# Names of sigmoids with a correction.
_SCORINGS = ("sigmoid", "noaux_tc")
# Defaults of absent fields.
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 62


class Dots1ForCausalLM(SharedExpertsForCausalLM):
    """Experts after the first layers, chosen by sigmoids with a correction, and shared ones; query and key norms.

    Layers from `max_window_layers` on may have sliding windows.
    """

    weight_table: ClassVar[WeightTable] = {**DECODER_WEIGHTS, **QUERY_KEY_NORMS}

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        fields.choice("scoring_func", _SCORINGS, "sigmoid")
        config = DecoderConfig.read(fields)
        routing = replace(read_grouped_routing(fields), normalizes=fields.flag("norm_topk_prob", default=False))
        layers = list(range(fields.count("first_k_dense_replace", default=0), config.num_layers))
        size, bias = fields.integer("moe_intermediate_size"), fields.flag("attention_bias", default=False)
        shared_size = size * fields.integer("n_shared_experts")
        model = plain_decoder(
            config,
            parallel,
            qkv_bias=bias,
            output_bias=bias,
            windows=_read_windows(fields, config.num_layers),
            query_key_norm=QueryKeyNorm,
            moe=mixtures(config, routing, size, parallel, layers, shared_size=shared_size, has_correction=True),
        )
        super().__init__(config, parallel, model, layers, routing)


def _read_windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    window = fields.optional_integer("sliding_window", default=_DEFAULT_WINDOW)
    first = fields.count("max_window_layers", default=_DEFAULT_MAX_WINDOW_LAYERS)
    from_first_on = [SLIDING if window is not None and layer >= first else FULL for layer in range(num_layers)]
    return windows_of(fields, read_layer_kinds(fields, default=from_first_on), window)
