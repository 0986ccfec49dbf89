"""Sweep over the causal language models of Transformers: each made tiny, with random weights, and compared.

A model type either gives the greedy tokens and log-probabilities of Transformers in float32, the same bits alone and
in a batch, or is refused with a reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.config import EngineConfig
from penstock.errors import PenstockError
from penstock.models.registry import refuse_unsuitable, supported_architectures
from support.checkpoints import VOCAB_SIZE, save_checkpoint
from support.engines import assert_greedy_continuation, greedy, make_core, random_prompts, run
from support.transformers_models import TINY, randomise, small_fields

NATIVE, THROUGH_TRANSFORMERS, REFUSED = "native", "through Transformers", "refused"
_NUM_TOKENS = 8
_PROMPTS = random_prompts((1, 3, 40, 17, 33, 8), VOCAB_SIZE)
_MOST_PARAMETERS = 5_000_000
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 36,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
}
_STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2}
_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = {
    **_KINDS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
# Fields that only these types call for.
_SMALL_OF_TYPE: dict[str, dict[str, Any]] = {
    "bamba": {**_STATE_SPACE, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _PLAIN_ROPE}},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots3_note": {"num_key_value_heads": 4},
    "ernie4_5_moe": {"moe_k": 2},
    "falcon_h1": {**_STATE_SPACE, "mamba_d_ssm": 128},
    "gemma3_text": {"attn_logit_softcapping": None},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 0, "intermediate_size": [112] * 4},
    "gpt_oss": {"rope_parameters": _PLAIN_ROPE},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {**_STATE_SPACE, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_LATENT, **_KINDS, "q_lora_rank": None, "linear_num_heads": 4, "linear_head_dim": 12},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 12},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 40,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 12,
        "n_groups": 2,
    },
    "olmo_hybrid": _DELTA,
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _DELTA),
    "axk1": _LATENT,
    "minicpm3": _LATENT,
    "youtu": _LATENT,
    "longcat_flash": {**_LATENT, "head_dim": 8, "ffn_hidden_size": 112, "expert_ffn_hidden_size": 48, "moe_topk": 2},
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "attention_window_size": 9,
        "logits_soft_cap": 2.0,
    },
    "roc_bert": {"pronunciation_embed_dim": 16, "shape_embed_dim": 16, "pronunciation_vocab_size": 97},
    "sarvam_mla": _LATENT,
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 8, "adapter_rank": 16},
}
_TAKES_MEDIA = "it takes [media](multimodal.md), and is tried there or refused by name"
# Types that are not made tiny, and why.
NOT_TRIED = {
    "dbrx": "Transformers does not build it from its own configuration",
    "gemma4_assistant": "it drafts for another model, from whose keys and values it reads",
    "gemma4_unified_assistant": "it drafts for another model, from whose keys and values it reads",
    "gemma3": _TAKES_MEDIA,
    "gemma3n": _TAKES_MEDIA,
    "got_ocr2": _TAKES_MEDIA,
    "moss_transcribe_diarize": _TAKES_MEDIA,
}
_OPTIONS = {"max_num_batched_tokens": 40, "block_size": 4, "dtype": "float32", "kv_cache_dtype": "float32"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """kind: one of the three above. reason: of a refusal."""

    kind: str
    reason: str = ""


def class_names() -> dict[str, str]:
    """Classes of causal language models by their model type."""
    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def has_native(model_type: str) -> bool:
    """Whether models of this type have a native class."""
    return class_names()[model_type] in supported_architectures()


def tiny_model_of_type(model_type: str) -> PreTrainedModel:
    """A tiny model with random weights."""
    return _tiny_model(class_names()[model_type], _tiny_config(model_type))


def outcome_of(model_type: str, folder: Path, *, model_impl: str = "auto") -> Outcome:
    """Run a tiny model of this type. Raises AssertionError for a wrong answer."""
    class_name = class_names()[model_type]
    try:
        config = _tiny_config(model_type)
    except Exception as error:  # of kinds that are refused anyway
        config, problem = CONFIG_MAPPING[model_type](), error
    else:
        problem = None
    _write_config(config, class_name, folder)
    try:
        refuse_unsuitable(EngineConfig.create(str(folder), model_impl=model_impl, device="cpu").model)
        if problem is not None:
            raise problem
        oracle = _tiny_model(class_name, config)
        save_checkpoint(oracle, folder)
        core = make_core(folder, model_impl=model_impl, **_OPTIONS)
    except PenstockError as error:
        return Outcome(REFUSED, reason_of(error, folder))
    try:
        together = run(core, _PROMPTS, greedy(_NUM_TOKENS, logprobs=5))
        alone = [run(core, [prompt], greedy(_NUM_TOKENS, logprobs=5))[0] for prompt in _PROMPTS]
    finally:
        core.close()
    for prompt, one, other in zip(_PROMPTS, together, alone, strict=True):
        assert len(one.tokens) == _NUM_TOKENS, one.error
        assert_greedy_continuation(oracle, prompt, one)
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs), "other bits alone and in a batch"
    return Outcome(NATIVE if model_impl == "auto" and has_native(model_type) else THROUGH_TRANSFORMERS)


def _tiny_config(model_type: str) -> PretrainedConfig:
    class_name, config_class = class_names()[model_type], CONFIG_MAPPING[model_type]
    wanted = getattr(transformers, class_name).config_class
    if config_class.sub_configs and config_class is not wanted:
        config_class = wanted  # of the language model in a model of several media
    config = config_class(**{**TINY, **small_fields(class_name, config_class), **_SMALL_OF_TYPE.get(model_type, {})})
    config._attn_implementation = "eager"
    return config


def _tiny_model(class_name: str, config: PretrainedConfig) -> PreTrainedModel:
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    assert num_parameters < _MOST_PARAMETERS, f"{num_parameters:,} parameters: fields that make it tiny are missing"
    return randomise(model_class(config))


def _write_config(config: PretrainedConfig, class_name: str, folder: Path) -> None:
    content = {"vocab_size": VOCAB_SIZE, **config.to_dict(), "architectures": [class_name]}
    (folder / "config.json").write_text(json.dumps(content, default=str))


def reason_of(error: PenstockError, folder: Path) -> str:
    """The reason of a refusal, as short as a table needs it."""
    text = str(error).split("cannot run through Transformers on paged attention: ")[-1]
    return text.replace(f"{folder}", "MODEL").rstrip(".")
