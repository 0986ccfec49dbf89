"""No field of a configuration is overlooked: what can change a result is read, and the rest is known not to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from penstock.config import ModelConfig
from penstock.models.registry import find_model_class
from penstock.parallel import ParallelState
from support.checkpoints import FAMILIES, RECURRENT, tiny_config

# Training, tokens, Transformers' own cache, and heads for other tasks.
WITHOUT_EFFECT = {
    "chunk_size",
    "mamba_chunk_size",
    "num_logits_to_keep",
    "rescale_prenorm_residual",
    "attention_dropout",
    "attn_pdrop",
    "bos_token_id",
    "embd_pdrop",
    "eod_token_id",
    "eos_token_id",
    "initializer_range",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "resid_pdrop",
    "router_aux_loss_coef",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "use_cache",
}
_INITIAL_OF_MAMBA = {
    *["rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_init_scheme"],
    *["time_step_max", "time_step_min", "time_step_scale", "use_associative_scan", "use_mambapy"],
}
# Transformers upcasts GPT-2's scores only if asked, here they always are; it writes Gemma 3's pattern beside the
# `layer_types` that follow from it; and Qwen has windows only where `use_sliding_window` says so.
# Of recurrent families: chunks of Transformers' scans, sums of other fields, and initial values.
_OF_EXPERTS = {
    *["moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "n_group", "n_routed_experts"],
    *["norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor", "topk_group"],
}
# Transformers gives attention neither a bias nor a window.
_NEMOTRON = {
    *["attention_bias", "expand", "hidden_dropout", "mamba_proj_bias", "mamba_ssm_cache_dtype", "residual_in_fp32"],
    *["moe_shared_expert_overlap", "mtp_layers_block_type", "n_shared_experts", "num_nextn_predict_layers"],
    *["sliding_window", "time_step_floor", "time_step_limit", "time_step_max", "use_mamba_kernels"],
}
WITHOUT_EFFECT_IN = {
    "gpt2": {"reorder_and_upcast_attn"},
    "gemma3": {"_sliding_window_pattern"},
    "qwen2": {"sliding_window"},
    "qwen3": {"sliding_window"},
    "bamba": {"z_loss_coefficient"},
    "falcon_h1": {"mamba_expand"},
    "mamba": _INITIAL_OF_MAMBA,
    "falcon_mamba": _INITIAL_OF_MAMBA,
    "jamba": {"use_mamba_kernels", "use_mambapy", "use_associative_scan"},
    "mamba2": {"residual_in_fp32", "time_step_floor", "time_step_max", "time_step_min", "time_step_rank"},
    "nemotron_h": _NEMOTRON | _OF_EXPERTS,
    "nemotron_h_moe": _NEMOTRON | {"intermediate_size"},
    "zamba2": {
        *["attention_head_dim", "attention_hidden_size", "hybrid_layer_ids", "kv_channels", "mamba_headdim"],
        *["num_query_groups", "time_step_floor", "time_step_max", "use_conv_bias", "use_long_context"],
        *["use_mamba_kernels", "use_mem_eff_path"],
    },
    "recurrent_gemma": {"final_w_init_variance_scale", "w_init_variance_scale"},
    "kimi_linear": {"qk_head_dim"},
    "minimax": {"block_size", "router_jitter_noise"},
    "olmo_hybrid": {
        "linear_a_log_max",
        "linear_a_log_min",
        "linear_dt_init_floor",
        "linear_dt_max",
        "linear_dt_min",
    },
}
# Read together, from a copy: `layers/rope_scaling.py` has tests of its own.
ROTARY = {
    "max_position_embeddings",
    "model_max_length",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
}


class Recording(dict[str, Any]):
    """Remembers which fields were asked for."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_every_field_of_the_family_is_read_or_known_to_have_no_effect(family: str) -> None:
    fields = tiny_config(family).to_dict() | {"architectures": [{**FAMILIES, **RECURRENT}[family].architecture]}
    recording = Recording(fields)
    config = ModelConfig("some/model", Path("nowhere"), Path("nowhere"), recording, {})
    find_model_class(config)(config, ParallelState())
    common = set(PretrainedConfig().to_dict()) - {"tie_word_embeddings"}
    overlooked = set(fields) - common - recording.asked - ROTARY - WITHOUT_EFFECT - WITHOUT_EFFECT_IN.get(family, set())
    assert not overlooked
