"""Fields of `config.json` that mixtures of experts and latent attention add to those of a plain decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.checkpoints.gguf.fields import Metadata

_SIGMOID = 2
# YaRN's factor on the scores is 1 + 0.1 * mscale * ln(factor); a file has the product 0.1 * mscale.
_YARN_LOG_FACTOR = 0.1
_LATENT_SIZE = ".attention.kv_lora_rank"


def latent_attention(metadata: Metadata) -> bool:
    """Whether the model has latent attention."""
    return metadata.nonzero(_LATENT_SIZE, int) is not None


def _experts(metadata: Metadata, name: str) -> dict[str, Any]:
    """Numbers of experts, and of those of a token. name: of the first in `config.json`."""
    return {
        name: metadata.size(".expert_count"),
        "num_experts_per_tok": metadata.size(".expert_used_count"),
    }


def _has_biases(metadata: Metadata) -> bool:
    return "blk.0.attn_q.bias" in metadata.tensors


def _layers_without_experts(metadata: Metadata) -> list[int]:
    # As many layers as have tensors, since a damaged file may claim any number.
    num_layers = min(metadata.size(".block_count"), len(metadata.tensors))
    return [layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" not in metadata.tensors]


def _qwen3moe(metadata: Metadata, decoder: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **decoder,
        **_experts(metadata, "num_experts"),
        "moe_intermediate_size": metadata.size(".expert_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": _layers_without_experts(metadata),
        "attention_bias": _has_biases(metadata),
    }


def _qwen2moe(metadata: Metadata, decoder: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **decoder,
        **_experts(metadata, "num_experts"),
        "moe_intermediate_size": metadata.size(".expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.size(".expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "mlp_only_layers": _layers_without_experts(metadata),
        "qkv_bias": _has_biases(metadata),
    }


def _gpt_oss(metadata: Metadata, decoder: Mapping[str, Any]) -> dict[str, Any]:
    scaling = decoder["rope_scaling"]
    return {
        **decoder,
        **_experts(metadata, "num_local_experts"),
        "intermediate_size": metadata.size(".expert_feed_forward_length"),
        "sliding_window": metadata.nonzero(".attention.sliding_window", int),
        "attention_bias": _has_biases(metadata),
        # The model's own settings, which files do not have.
        "rope_scaling": None
        if scaling is None
        else {**scaling, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    }


def _deepseek2(metadata: Metadata, decoder: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek V2, or V3 and R1, whose experts are chosen by sigmoids."""
    rotated = metadata.size(".rope.dimension_count")
    # Files in which keys and values are those of the latent have the heads' sizes under names of their own.
    key_size = metadata.get(".attention.key_length_mla", int) or metadata.size(".attention.key_length")
    value_size = metadata.get(".attention.value_length_mla", int) or metadata.size(".attention.value_length")
    num_groups = metadata.nonzero(".expert_group_count", int, 1)
    is_v3 = metadata.get(".expert_gating_func", int, 1) == _SIGMOID
    names = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"} if is_v3 else {}
    method = "noaux_tc" if is_v3 else "group_limited_greedy" if num_groups > 1 else "greedy"
    without = ("head_dim", "partial_rotary_factor")
    return {
        **{name: value for name, value in decoder.items() if name not in without},
        **names,
        **_experts(metadata, "n_routed_experts"),
        "num_key_value_heads": decoder["num_attention_heads"],
        "q_lora_rank": metadata.nonzero(".attention.q_lora_rank", int),
        "kv_lora_rank": metadata.size(_LATENT_SIZE),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_size - rotated,
        "v_head_dim": value_size,
        "moe_intermediate_size": metadata.size(".expert_feed_forward_length"),
        "n_shared_experts": metadata.get(".expert_shared_count", int, 0),
        "first_k_dense_replace": metadata.get(".leading_dense_block_count", int, 0),
        "routed_scaling_factor": metadata.nonzero(".expert_weights_scale", float, 1.0),
        "norm_topk_prob": metadata.get(".expert_weights_norm", bool, False),
        "n_group": num_groups,
        "topk_group": metadata.nonzero(".expert_group_used_count", int, num_groups),
        "topk_method": method,
        "rope_scaling": _sharpened(metadata, decoder["rope_scaling"]),
    }


def _sharpened(metadata: Metadata, scaling: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Add the factor of YaRN on the scores."""
    factor = metadata.get(".rope.scaling.yarn_log_multiplier", float)
    if scaling is None or factor is None:
        return scaling
    mscale = round(factor / _YARN_LOG_FACTOR, 6)
    return {**scaling, "mscale": mscale, "mscale_all_dim": mscale}


# Class in Transformers, and function that makes the fields from those of the plain decoder, by architecture.
MIXTURES: Mapping[str, tuple[str, Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]]] = {
    "deepseek2": ("DeepseekV2ForCausalLM", _deepseek2),
    "gpt-oss": ("GptOssForCausalLM", _gpt_oss),
    "qwen2moe": ("Qwen2MoeForCausalLM", _qwen2moe),
    "qwen3moe": ("Qwen3MoeForCausalLM", _qwen3moe),
}
