"""Greedy tokens and log-probabilities equal Transformers in float32, however the work is cut into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.contract import FullAttentionSpec
from penstock.scheduler.kv_cache_plan import bytes_per_block, bytes_to_serve
from support.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_model
from support.engines import assert_greedy_continuation, greedy, make_core, random_prompts, run

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-bias-head-80": ("llama", {"attention_bias": True, "head_dim": 80}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-mixed-windows": (
        "qwen2",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied-mqa": ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "phi3": (
        "phi3",
        {
            "sliding_window": 9,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            },
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "num_hidden_layers": 3,
            "sliding_window": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "gpt2": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
}
# The same families with other layouts of heads and layers.
MORE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-mha-tied": ("phi3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "gemma2-without-caps": (
        "gemma2",
        {
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "num_key_value_heads": 4,
        },
    ),
    "gemma3-7-layers": ("gemma3", {"num_hidden_layers": 7, "sliding_window": 8}),
    "gemma3-mqa-other-pattern": (
        "gemma3",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
    "llama4-chunks": ("llama4", {}),
    "olmo2-mha-bias": ("olmo2", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
}
LENGTHS = (1, 3, 40, 17, 16, 33, 8, 55)
NUM_TOKENS = 20
# What the engine does differently; the tokens must not show it.
SETTINGS: dict[str, dict[str, Any]] = {
    "one step per prompt": {"max_num_batched_tokens": 1024},
    "chunked prefill": {"max_num_batched_tokens": 13},
    "asynchronous": {"async_scheduling": True},
    "asynchronous, chunked, small blocks": {
        "async_scheduling": True,
        "max_num_batched_tokens": 19,
        "block_size": 3,
    },
    "no prefix cache": {"enable_prefix_caching": False},
    "reference attention": {"attention_backend": "reference"},
}


@pytest.fixture(scope="module", params=[*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_MODELS)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    family, overrides = (MODELS | MORE_MODELS)[request.param]
    folder = tmp_path_factory.mktemp("model")
    oracle = tiny_model(family, **overrides)
    save_checkpoint(oracle, folder)
    return oracle, folder


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.each_value_quick
def test_mixed_prompts(model: tuple[Any, Path], setting: str) -> None:
    oracle, folder = model
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    core = make_core(folder, **SETTINGS[setting])
    for prompt, result in zip(prompts, run(core, prompts, greedy(NUM_TOKENS, logprobs=3)), strict=True):
        assert len(result.tokens) == len(result.logprobs) == NUM_TOKENS
        assert_greedy_continuation(oracle, prompt, result)
    core.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.one_case_quick
def test_prefix_hits(model: tuple[Any, Path], async_scheduling: bool) -> None:
    oracle, folder = model
    shared = random_prompts([37], VOCAB_SIZE, seed=5)[0]
    prompts = [shared + tail for tail in random_prompts([1, 4, 9], VOCAB_SIZE, seed=6)]
    core = make_core(folder, async_scheduling=async_scheduling, block_size=4)
    assert run(core, [shared], greedy(4))[0].num_cached_tokens == 0
    for prompt, result in zip(prompts, run(core, prompts, greedy(NUM_TOKENS, logprobs=2)), strict=True):
        assert result.num_cached_tokens >= 32
        assert_greedy_continuation(oracle, prompt, result)
    whole = run(core, prompts, greedy(NUM_TOKENS, logprobs=2))
    for prompt, result in zip(prompts, whole, strict=True):
        assert result.num_cached_tokens >= (len(prompt) - 1) // 4 * 4
        assert_greedy_continuation(oracle, prompt, result)
    core.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.one_case_quick
def test_preemption_under_a_tiny_kv_cache(model: tuple[Any, Path], async_scheduling: bool) -> None:
    oracle, folder = model
    options = {"block_size": 4, "max_model_len": 72, "max_num_batched_tokens": 8}
    options["async_scheduling"] = async_scheduling
    core = make_core(folder, **options, kv_cache_memory_bytes=_barely_enough(folder, options))
    prompts = random_prompts((20, 31, 17, 25, 40, 6), VOCAB_SIZE, seed=7)
    results = run(core, prompts, greedy(30, logprobs=1))
    # Where every layer has a window, a request needs no more blocks as it grows, so it waits rather than gives way.
    if any(isinstance(group.spec, FullAttentionSpec) for group in core.kv_cache_config.groups):
        assert sum(result.num_preemptions for result in results) > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.tokens) == 30
        assert_greedy_continuation(oracle, prompt, result)
    core.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.one_case_quick
def test_a_context_used_to_its_last_position(model: tuple[Any, Path], async_scheduling: bool) -> None:
    oracle, folder = model
    core = make_core(folder, max_model_len=48, async_scheduling=async_scheduling, block_size=5)
    prompts = random_prompts([20, 47, 1], VOCAB_SIZE, seed=8)
    results = run(core, prompts, [greedy(48 - len(prompt), logprobs=1) for prompt in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        assert len(prompt) + len(result.tokens) == 48
        assert_greedy_continuation(oracle, prompt, result)
    core.close()


def _barely_enough(folder: Path, options: dict[str, Any]) -> int:
    """Bytes of a KV cache for little more than one request of the longest length."""
    core = make_core(folder, **options)
    groups = core.kv_cache_config.groups
    core.close()
    return bytes_to_serve(groups, 72, 8) + 2 * bytes_per_block(groups, 0)
