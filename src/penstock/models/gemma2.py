"""Gemma 2 (Gemma team 2024, https://arxiv.org/abs/2408.00118)."""

from __future__ import annotations

from penstock.config import ModelConfig
from penstock.models.config_fields import ConfigFields
from penstock.models.gemma_decoder import GemmaForCausalLM, read_gemma_config
from penstock.models.layer_kinds import FULL, SLIDING, read_layer_kinds
from penstock.parallel import ParallelState

# Default of an absent field; null means no cap.
_DEFAULT_ATTENTION_SOFT_CAP = 50.0
_DEFAULT_LOGITS_SOFT_CAP = 30.0


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Gemma's decoder with soft caps on scores and logits, and a sliding window in every second layer."""

    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        fields = ConfigFields(model_config)
        config = read_gemma_config(fields)
        alternating = [FULL if layer % 2 else SLIDING for layer in range(config.num_layers)]
        kinds = read_layer_kinds(fields, default=alternating)
        super().__init__(
            fields,
            config,
            parallel,
            kinds,
            soft_cap=fields.optional_number("attn_logit_softcapping", default=_DEFAULT_ATTENTION_SOFT_CAP),
            logits_soft_cap=fields.optional_number("final_logit_softcapping", default=_DEFAULT_LOGITS_SOFT_CAP),
        )
