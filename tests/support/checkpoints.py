"""Small random checkpoints, written by Transformers, whose own model is the oracle."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from penstock.config import ModelConfig

VOCAB_SIZE = 97
_TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TINY_GEMMA = {**_TINY, "head_dim": 16, "query_pre_attn_scalar": 24, "pad_token_id": 0}
_TINY_GRANITE = {
    **_TINY,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.6,
    "pad_token_id": 0,
}
_TINY_HUNYUAN = {
    **_TINY,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "alpha": 50.0, "factor": 1.0},
    "pad_token_id": 0,
}
_TINY_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_inner": 112,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """Transformers' class names of a model family, and fields of its tiny configuration.

    norm_weight: mean of random norm weights.
    """

    config_class: str
    architecture: str
    tiny: dict[str, Any] = field(default_factory=lambda: _TINY)
    norm_weight: float = 1.0


FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM"),
    "mistral": Family("MistralConfig", "MistralForCausalLM"),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM"),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM", {**_TINY, "pad_token_id": 0}),
    "gemma2": Family("Gemma2Config", "Gemma2ForCausalLM", _TINY_GEMMA, norm_weight=0.0),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", _TINY_GEMMA, norm_weight=0.0),
    "gpt2": Family("GPT2Config", "GPT2LMHeadModel", _TINY_GPT2),
    "granite": Family("GraniteConfig", "GraniteForCausalLM", _TINY_GRANITE),
    "ernie4_5": Family("Ernie4_5Config", "Ernie4_5ForCausalLM", {**_TINY, "head_dim": 16, "pad_token_id": 0}),
    "hunyuan_v1_dense": Family("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", _TINY_HUNYUAN),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM", {**_TINY, "pad_token_id": 0}),
}

_TINY_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
# Mixtures of experts.
_TINY_MOE = {**_TINY, "moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": 0}
_TINY_LATENT = {
    **{name: value for name, value in _TINY_MOE.items() if name not in ("num_experts", "head_dim")},
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "kv_lora_rank": 24,
    "q_lora_rank": 36,
}
_TINY_LATENT_FLASH = {name: value for name, value in _TINY_LATENT.items() if name != "first_k_dense_replace"}
# Factors of each pair of dimensions of a head of 16.
TINY_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 128,
}
MIXTURES = {
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", {**_TINY, "num_local_experts": 5}),
    "qwen2_moe": Family("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**_TINY_MOE, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _TINY_MOE),
    "glm4_moe": Family(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            **{name: value for name, value in _TINY_MOE.items() if name != "num_experts"},
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "head_dim": 16,
        },
    ),
    "deepseek_v2": Family(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**_TINY_LATENT, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": Family("DeepseekV3Config", "DeepseekV3ForCausalLM", _TINY_LATENT),
    "glm4_moe_lite": Family("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", _TINY_LATENT_FLASH),
    "gpt_oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **_TINY,
            "intermediate_size": 48,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "sliding_window": 9,
            "swiglu_limit": 0.9,
            "rope_parameters": {**_TINY_YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
            "pad_token_id": 0,
        },
    ),
    "dots1": Family(
        "Dots1Config",
        "Dots1ForCausalLM",
        {
            **{name: value for name, value in _TINY_MOE.items() if name != "num_experts"},
            "n_routed_experts": 6,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {
            **_TINY,
            "moe_intermediate_size": 48,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "pad_token_id": 0,
        },
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1Config",
        "HunYuanMoEV1ForCausalLM",
        {**_TINY_HUNYUAN, "intermediate_size": 48, "num_experts": 6, "moe_topk": 3},
    ),
    "phimoe": Family(
        "PhimoeConfig",
        "PhimoeForCausalLM",
        {
            **_TINY,
            "intermediate_size": 48,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": TINY_LONGROPE,
            "original_max_position_embeddings": 128,
            "pad_token_id": 0,
        },
    ),
    "granitemoe": Family(
        "GraniteMoeConfig", "GraniteMoeForCausalLM", {**_TINY_GRANITE, "intermediate_size": 48, "num_local_experts": 5}
    ),
    "llama4": Family(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **_TINY,
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "intermediate_size_mlp": 80,
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1, 1],
            "attention_chunk_size": 10,
            "floor_scale": 7,
            "attn_scale": 0.4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
            "pad_token_id": 0,
        },
    ),
    "minimax_m2": Family(
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {
            **_TINY,
            "intermediate_size": 48,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "olmoe": Family("OlmoeConfig", "OlmoeForCausalLM", {**_TINY_MOE, "intermediate_size": 48}),
}
# Families with recurrent layers.
_TINY_LFM2 = {
    **{name: value for name, value in _TINY.items() if name != "rms_norm_eps"},
    "num_hidden_layers": 4,
    "norm_eps": 1e-5,
    "pad_token_id": 0,
    "conv_L_cache": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_TINY_MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
}
_TINY_GRANITE_HYBRID = {
    **_TINY_GRANITE,
    **_TINY_MAMBA,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "shared_intermediate_size": 80,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
_TINY_SELECTIVE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "state_size": 12,
    "time_step_rank": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TINY_DELTA = {
    **_TINY,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    "pad_token_id": 0,
}
_TINY_SHARED_MOE = {
    "moe_intermediate_size": 48,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 40,
}
_TINY_DELTA_MOE = {name: value for name, value in _TINY_DELTA.items() if name != "intermediate_size"} | _TINY_SHARED_MOE
_TINY_NEMOTRON = {
    **{name: value for name, value in _TINY.items() if name not in ("num_hidden_layers", "rms_norm_eps")},
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    "time_step_min": 0.7,
    "pad_token_id": 0,
}
RECURRENT = {
    "bamba": Family(
        "BambaConfig",
        "BambaForCausalLM",
        {
            **_TINY,
            **_TINY_MAMBA,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "pad_token_id": 0,
        },
    ),
    "falcon_h1": Family(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **_TINY,
            **_TINY_MAMBA,
            "mamba_d_ssm": 96,
            "pad_token_id": 0,
            "lm_head_multiplier": 0.7,
            "embedding_multiplier": 1.4,
            "mlp_multipliers": [0.6, 1.3],
            "key_multiplier": 0.8,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.9,
            "ssm_multipliers": [0.6, 1.2, 0.7, 1.3, 0.8],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.75,
        },
    ),
    "nemotron_h": Family(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **_TINY_NEMOTRON,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        },
    ),
    "nemotron_h_moe": Family(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **_TINY_NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.5,
        },
    ),
    "zamba2": Family(
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {
            **{name: value for name, value in _TINY.items() if name != "num_key_value_heads"},
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": True,
            "adapter_rank": 16,
            "use_mem_rope": True,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 12,
            "time_step_min": 0.7,
            "pad_token_id": 0,
        },
        # Attention with larger inputs, which are twice as wide and have adapters, has one key, and makes errors large.
        norm_weight=0.3,
    ),
    "recurrent_gemma": Family(
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {
            **{name: value for name, value in _TINY.items() if name != "max_position_embeddings"},
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "intermediate_size": 224,
            "attention_window_size": 9,
            "lru_width": 80,
            "logits_soft_cap": 5.0,
            "pad_token_id": 0,
        },
        norm_weight=0.0,
    ),
    "mamba2": Family(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_heads": 6,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 12,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
    "mamba": Family("MambaConfig", "MambaForCausalLM", _TINY_SELECTIVE),
    "falcon_mamba": Family(
        "FalconMambaConfig",
        "FalconMambaForCausalLM",
        # Another size than `expand` says, as published.
        {**_TINY_SELECTIVE, "tie_word_embeddings": False, "intermediate_size": 76},
    ),
    "jamba": Family(
        "JambaConfig",
        "JambaForCausalLM",
        {
            **_TINY,
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "mamba_d_state": 12,
            "pad_token_id": 0,
        },
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**_TINY_GRANITE_HYBRID, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "lfm2": Family("Lfm2Config", "Lfm2ForCausalLM", {**_TINY_LFM2, "block_multiple_of": 16}),
    "lfm2_moe": Family(
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {
            **_TINY_LFM2,
            "moe_intermediate_size": 48,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "kimi_linear": Family(
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            **{
                name: value
                for name, value in _TINY_LATENT_FLASH.items()
                if name not in ("q_lora_rank", "n_routed_experts")
            },
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 12,
        },
    ),
    "minimax": Family(
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        {
            **_TINY,
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "num_local_experts": 5,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "block_size": 8,
            "full_attn_alpha_factor": 1.5,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 0.9,
            "linear_attn_beta_factor": 1.2,
            "mlp_alpha_factor": 1.1,
            "mlp_beta_factor": 0.7,
            "pad_token_id": 0,
        },
    ),
    "olmo_hybrid": Family(
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {
            **_TINY,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "pad_token_id": 0,
        },
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_TINY_DELTA, **_TINY_SHARED_MOE, "mlp_only_layers": [1]},
        norm_weight=0.0,
    ),
    "qwen3_5": Family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _TINY_DELTA, norm_weight=0.0),
    "qwen3_5_moe": Family("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _TINY_DELTA_MOE, norm_weight=0.0),
}
_ALL = {**FAMILIES, **MIXTURES, **RECURRENT}


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    """Tiny configuration of one of `FAMILIES`, `MIXTURES` or `RECURRENT`, which runs in milliseconds."""
    config_class = getattr(transformers, _ALL[family].config_class)
    return config_class(**{**_ALL[family].tiny, **overrides})


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Transformers' model in float32 with eager attention; all weights random, so that each of them matters."""
    config = tiny_config(family, **overrides)
    config._attn_implementation = "eager"
    model = getattr(transformers, _ALL[family].architecture)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random_values(name, parameter, generator, _ALL[family].norm_weight))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    return model.eval()


def save_checkpoint(
    model: PreTrainedModel, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB"
) -> ModelConfig:
    """Write `config.json` and safetensors in this dtype; the model itself is left as it is."""
    weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)
    return load_config(folder)


def tiny_checkpoint(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> ModelConfig:
    """A saved `tiny_model`, for tests that need some model and do not look at its weights."""
    return save_checkpoint(tiny_model(family, seed=seed, **overrides), folder)


def load_config(folder: Path) -> ModelConfig:
    """Load the configuration of the model in a folder."""
    return ModelConfig.load(str(folder))


def edit_config(folder: Path, *, remove: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    """Change fields of a saved `config.json`, as other tools or versions would have written it."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in remove}))
    return load_config(folder)


def oracle_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Transformers' float32 logits for a whole sequence: [T, V]."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float()


def _random_values(name: str, parameter: Tensor, generator: torch.Generator, norm_weight: float) -> Tensor:
    values = torch.randn(parameter.shape, generator=generator)
    if parameter.ndim > 1:
        return values * 1.5 / parameter.shape[-1] ** 0.5
    return values * 0.3 if name.endswith("bias") else norm_weight + 0.3 * values
