"""Small random models of any class of Transformers, and the families that must run through the fallback."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from penstock.config import LoadConfig, ModelConfig
from penstock.loader.loader import load_model
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import VOCAB_SIZE, save_checkpoint

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_PARTIAL_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]

# By name of a variant: the class, and what makes it show what is particular to its family.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-neox": ("GPTNeoXForCausalLM", _PARTIAL_ROPE),
    "gpt-neox-sequential": ("GPTNeoXForCausalLM", {"use_parallel_residual": False, "tie_word_embeddings": True}),
    "stablelm": ("StableLmForCausalLM", _PARTIAL_ROPE),
    "stablelm-norms": (
        "StableLmForCausalLM",
        {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2": ("Starcoder2ForCausalLM", {}),
    "starcoder2-window": ("Starcoder2ForCausalLM", {"sliding_window": 9}),
    "cohere2": (
        "Cohere2ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 8, "layer_types": _MIXED_LAYERS, "logit_scale": 0.3},
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    "smollm3-window": (
        "SmolLM3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": 11,
            "layer_types": _MIXED_LAYERS,
        },
    ),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 32, **_PARTIAL_ROPE}),
    "phi": ("PhiForCausalLM", _PARTIAL_ROPE),
    "phi-norms": ("PhiForCausalLM", {"qk_layernorm": True, "num_key_value_heads": 4}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 112}),
    "opt-post-norm": (
        "OPTForCausalLM",
        {"ffn_dim": 112, "do_layer_norm_before": False, "word_embed_proj_dim": 48, "enable_bias": False},
    ),
}
# Families that compute attention by themselves in Transformers.
OWN_ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", {"hidden_size": 96, "n_head": 6, "n_layer": 2, "seq_length": 128}),
    "mpt": ("MptForCausalLM", {"d_model": 96, "n_heads": 6, "n_layers": 2, "max_seq_len": 128}),
    "falcon": ("FalconForCausalLM", {}),
    "falcon-multi-head": ("FalconForCausalLM", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon-new": ("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-alibi": ("FalconForCausalLM", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
}
# Families that run just as well, but whose plan is found out by building them.
PLANNED_BY_BUILDING: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("GPTJForCausalLM", {"rotary_dim": 8}),
    "codegen": ("CodeGenForCausalLM", {"rotary_dim": 8}),
}
# Further classes of Transformers whose logits are compared by a slow test.
WIDER = (
    "AfmoeForCausalLM",
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "AriaTextForCausalLM",
    "BeamForCausalLM",
    "BioGptForCausalLM",
    "BitNetForCausalLM",
    "CTRLLMHeadModel",
    "Cohere2MoeForCausalLM",
    "CohereForCausalLM",
    "CwmForCausalLM",
    "Dots1ForCausalLM",
    "Emu3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "ExaoneMoeForCausalLM",
    "FlexOlmoForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "GemmaForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "HYV3ForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "HyperCLOVAXForCausalLM",
    "Jais2ForCausalLM",
    "Kolibri1ForCausalLM",
    "LagunaForCausalLM",
    "LlamaForCausalLM",
    "MellumForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MiniMaxM3VLForCausalLM",
    "Ministral3ForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "ModernBertDecoderForCausalLM",
    "MoshiForCausalLM",
    "NanoChatForCausalLM",
    "NemotronForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoForCausalLM",
    "OlmoeForCausalLM",
    "PersimmonForCausalLM",
    "Phi3ForCausalLM",
    "PhimoeForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SeedOssForCausalLM",
    "SolarOpenForCausalLM",
    "VaultGemmaForCausalLM",
)
# Fields that make them small, mixtures of experts and layers with windows among them, where they have these fields.
_SMALL_WHERE_PRESENT: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "head_dim": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "sliding_window": 9,
    "use_sliding_window": True,
    "attn_logit_softcapping": 4.0,
    "logit_scale": 0.5,
}
# What only some classes call for.
_SMALL_OF_CLASS: dict[str, dict[str, Any]] = {
    "Glm4MoeLiteForCausalLM": {  # heads of keys and of values must be of one size
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
    },
}


def wider_overrides(class_name: str) -> dict[str, Any]:
    """Configuration fields that make one of `WIDER` small."""
    return small_fields(class_name, getattr(transformers, class_name).config_class)


def small_fields(class_name: str, config_class: type[PretrainedConfig]) -> dict[str, Any]:
    """Fields beside `TINY` that make a configuration for this class small."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    small = {name: value for name, value in _SMALL_WHERE_PRESENT.items() if name in fields}
    return small | _SMALL_OF_CLASS.get(class_name, {})


def tiny_config_of(class_name: str, **overrides: Any) -> PretrainedConfig:
    """Tiny configuration of the class, which runs in milliseconds."""
    return getattr(transformers, class_name).config_class(**{**TINY, **overrides})


def tiny_transformers_model(
    class_name: str, *, seed: int = 0, attention: str = "eager", **overrides: Any
) -> PreTrainedModel:
    """Create a model in float32 with this attention; all weights random, so that each affects the output."""
    config = tiny_config_of(class_name, **overrides)
    config._attn_implementation = attention
    return randomise(getattr(transformers, class_name)(config), seed)


def randomise(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Make all weights random, so that each affects the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                values *= 1.5 / parameter.shape[-1] ** 0.5
            else:
                values = values * 0.3 if name.endswith("bias") else 1 + 0.3 * values
            parameter.copy_(values)
    return model.eval()


def save_for_fallback(model: PreTrainedModel, folder: Path) -> ModelConfig:
    """Save a model; the configuration asks for Transformers' implementation even where there is one here."""
    return dataclasses.replace(save_checkpoint(model, folder), model_impl="transformers")


def load(
    model_config: ModelConfig, dtype: torch.dtype = torch.float32, parallel: ParallelState | None = None
) -> CausalLM:
    """The model on the CPU, ready to run."""
    quiet = LoadConfig(use_tqdm_on_load=False)
    return load_model(model_config, quiet, parallel or ParallelState(), torch.device("cpu"), dtype)
