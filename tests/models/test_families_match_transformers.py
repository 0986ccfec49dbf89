"""Every model family gives Transformers' logits, whatever its configuration says."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock.attention import NO_CONTEXT
from penstock.config import LoadConfig, ModelConfig
from penstock.layers.linear import PackedMethod
from penstock.loader.loader import load_model
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import (
    VOCAB_SIZE,
    edit_config,
    load_config,
    oracle_logits,
    save_checkpoint,
    tiny_model,
)
from support.plain_attention import sequence_logits

_RANDOM = random.Random(0)
SEQUENCES = [[_RANDOM.randrange(VOCAB_SIZE) for _ in range(length)] for length in (23, 1, 60, 7)]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0],
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}


def load(model_config: ModelConfig, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(model_config, LoadConfig(), ParallelState(), torch.device("cpu"), dtype)


def assert_matches(model: CausalLM, oracle: PreTrainedModel) -> None:
    for tokens, logits in zip(SEQUENCES, sequence_logits(model, SEQUENCES), strict=True):
        expected = oracle_logits(oracle, tokens)
        assert expected.std() > 0.3, "logits this small would match anything"
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    ("llama", {"head_dim": 80, "num_attention_heads": 2}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": LLAMA3_ROPE}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}}),
    ("llama", {"rope_parameters": YARN_ROPE}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 9}),
    ("mistral", {"sliding_window": 1, "head_dim": 32}),
    ("mistral", {"sliding_window": 16, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("qwen2", {"sliding_window": 9, "use_sliding_window": False}),
    ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}),
    (
        "qwen2",
        {
            "sliding_window": 5,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    ("qwen2", {"rope_parameters": {**YARN_ROPE, "rope_theta": 1000000.0}}),
    ("qwen3", {"head_dim": 32}),
    ("qwen3", {"head_dim": 64, "num_key_value_heads": 4}),
    ("qwen3", {"head_dim": 80, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16, "attention_bias": True}),
    ("qwen3", {"head_dim": 32, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}),
    ("llama", {"hidden_act": "gelu"}),
    ("phi3", {}),
    ("phi3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("phi3", {"sliding_window": 9}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 128}),
    ("phi3", {"rope_parameters": {**LONG_ROPE, "factor": 4.0}, "original_max_position_embeddings": 128}),
    ("phi3", {"rope_parameters": {**LONG_ROPE, "attention_factor": 1.3}, "original_max_position_embeddings": 128}),
    ("gemma2", {}),
    ("gemma2", {"sliding_window": 9, **CAPS}),
    ("gemma2", {"sliding_window": 9, **NO_CAPS, "num_hidden_layers": 3}),
    ("gemma2", {"sliding_window": 1, **CAPS, "head_dim": 32, "num_key_value_heads": 4, "attention_bias": True}),
    ("gemma2", {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}),
    ("gemma2", {"sliding_window": 9, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": False}),
    ("gemma2", {"hidden_activation": "gelu", "query_pre_attn_scalar": 144}),
    ("gemma3", {"num_hidden_layers": 6, "sliding_window": 9}),
    ("gemma3", {"num_hidden_layers": 7, "sliding_window": 9, "sliding_window_pattern": 3, "head_dim": 32}),
    ("gemma3", {"sliding_window": 9, "layer_types": ["full_attention"] * 2, "final_logit_softcapping": 4.0}),
    ("gemma3", {"sliding_window": 9, "layer_types": ["sliding_attention"] * 2, "attention_bias": True}),
    (
        "gemma3",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            },
            "tie_word_embeddings": False,
        },
    ),
    ("gpt2", {}),
    ("gpt2", {"tie_word_embeddings": False, "n_inner": None, "n_head": 2}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "layer_norm_epsilon": 1e-2}),
    ("gpt2", {"scale_attn_weights": False, "reorder_and_upcast_attn": True, "activation_function": "relu"}),
    ("granite", {}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("ernie4_5", {}),
    ("ernie4_5", {"use_bias": True, "head_dim": 32, "tie_word_embeddings": False}),
    ("ernie4_5", {"head_dim": None, "num_attention_heads": 8, "rope_parameters": YARN_ROPE}),
    ("hunyuan_v1_dense", {}),
    ("hunyuan_v1_dense", {"attention_bias": True, "head_dim": 32, "tie_word_embeddings": True}),
    ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}}),
    ("olmo2", {}),
    ("olmo2", {"num_key_value_heads": 4, "attention_bias": True}),
    ("olmo2", {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
]


@pytest.mark.parametrize(("family", "overrides"), CONFIGS, ids=lambda value: str(value))
def test_logits_equal_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    oracle = tiny_model(family, **overrides)
    # Transformers' "dynamic" has the frequencies of the longest sequence so far, and so of this length at most.
    config = replace(save_checkpoint(oracle, tmp_path), max_model_len=oracle.config.max_position_embeddings)
    assert_matches(load(config), oracle)


@pytest.mark.parametrize("model_impl", ["penstock", "transformers"])
@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 128),
        ({"rope_type": "dynamic", "factor": 4.0}, 128),
        ({"rope_type": "yarn", "factor": 4.0}, 128),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}, 128),
    ],
    ids=str,
)
def test_a_stretched_context_is_used_to_its_end(
    tmp_path: Path, rope: dict[str, Any], longest: int, model_impl: str
) -> None:
    rope = {"rope_theta": 10000.0, **rope}
    oracle = tiny_model("llama", max_position_embeddings=32, rope_parameters=rope)
    config = replace(save_checkpoint(oracle, tmp_path), model_impl=model_impl)
    assert config.longest_context == longest
    tokens = [(7 * index + index // 5) % VOCAB_SIZE for index in range(longest)]
    expected = oracle_logits(oracle, tokens)
    assert expected.std() > 0.3, "logits this small would match anything"
    torch.testing.assert_close(sequence_logits(load(config), [tokens])[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "overrides", "remove", "old_fields"),
    [
        ("phi3", {"sliding_window": None}, ("rope_parameters", "original_max_position_embeddings"), {}),
        (
            "phi3",
            {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 128, "max_position_embeddings": 512},
            ("rope_parameters",),
            {
                "max_position_embeddings": 512,
                "rope_scaling": {**{k: v for k, v in LONG_ROPE.items() if k.endswith("factor")}, "type": "su"},
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}},
            ("rope_parameters",),
            {"rope_theta": 500.0, "rope_scaling": None, "partial_rotary_factor": 0.75},
        ),
        (
            "gemma2",
            {"sliding_window": 9, "num_hidden_layers": 3},
            ("layer_types", "rope_parameters", "tie_word_embeddings", "attention_bias", "hidden_activation"),
            {"rope_theta": 10000.0, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
        ),
        (
            "gemma2",
            {"head_dim": 256, "query_pre_attn_scalar": 256, "num_attention_heads": 2},
            ("head_dim", "query_pre_attn_scalar", "sliding_window", "attn_logit_softcapping"),
            {},
        ),
        (
            "gemma3",
            {"sliding_window": 9, "num_hidden_layers": 7},
            ("layer_types", "rope_parameters", "final_logit_softcapping", "attn_logit_softcapping"),
            {"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None},
        ),
        (
            "gemma3",
            {
                "sliding_window": 9,
                "num_hidden_layers": 4,
                "sliding_window_pattern": 2,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
                },
            },
            ("layer_types", "rope_parameters"),
            {
                "rope_theta": 50000.0,
                "rope_local_base_freq": 3000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window_pattern": 2,
            },
        ),
        (
            "gpt2",
            {"n_inner": None},
            ("n_inner", "tie_word_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
            {"n_ctx": 128, "reorder_and_upcast_attn": False},
        ),
        ("olmo2", {"num_key_value_heads": 4}, ("num_key_value_heads", "attention_bias", "rope_parameters"), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_configuration_as_found_beside_old_checkpoints_means_the_same(
    tmp_path: Path, family: str, overrides: dict[str, Any], remove: tuple[str, ...], old_fields: dict[str, Any]
) -> None:
    oracle = tiny_model(family, **overrides)
    save_checkpoint(oracle, tmp_path)
    old = edit_config(tmp_path, remove=remove, **old_fields)
    assert not set(remove) & set(old.hf_config)
    with_limit = replace(old, max_model_len=128)
    assert_matches(load(with_limit), oracle)


@pytest.mark.parametrize("max_model_len", [None, "auto", 64, 32])
def test_longrope_takes_the_long_factors_when_longer_sequences_are_served(
    tmp_path: Path, max_model_len: int | str | None
) -> None:
    fields = {"original_max_position_embeddings": 32, "factor": 4.0}
    own = {**LONG_ROPE, **fields}
    save_checkpoint(tiny_model("phi3", rope_parameters=own, original_max_position_embeddings=32), tmp_path)
    model = load(replace(load_config(tmp_path), max_model_len=max_model_len))
    factors = own["short_factor" if max_model_len == 32 else "long_factor"]
    always = {**own, "short_factor": factors, "long_factor": factors}
    oracle = tiny_model("phi3", rope_parameters=always, original_max_position_embeddings=32)
    sequences = [sequence for sequence in SEQUENCES if len(sequence) <= 32 or max_model_len != 32]
    for tokens, logits in zip(sequences, sequence_logits(model, sequences), strict=True):
        torch.testing.assert_close(logits, oracle_logits(oracle, tokens), rtol=0, atol=1e-4)


def test_a_wide_model_with_packed_weights_equals_transformers(tmp_path: Path) -> None:
    oracle = tiny_model("llama", hidden_size=512, intermediate_size=1100, tie_word_embeddings=True, vocab_size=1200)
    model = load(save_checkpoint(oracle, tmp_path))
    packed = [
        name for name, module in model.named_modules() if isinstance(getattr(module, "method", None), PackedMethod)
    ]
    assert "lm_head" in packed
    assert any("gate_up_proj" in name for name in packed)
    assert_matches(model, oracle)


@pytest.mark.parametrize(
    ("rope", "old_fields"),
    [
        ({"rope_type": "default", "rope_theta": 5000.0}, {"rope_theta": 5000.0, "rope_scaling": None}),
        (
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        (
            LLAMA3_ROPE,
            {
                "rope_theta": LLAMA3_ROPE["rope_theta"],
                "rope_scaling": {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"},
            },
        ),
    ],
    ids=["default", "linear", "llama3"],
)
def test_a_configuration_of_transformers_4_means_the_same(
    tmp_path: Path, rope: dict[str, Any], old_fields: dict[str, Any]
) -> None:
    oracle = tiny_model("llama", rope_parameters=rope)
    save_checkpoint(oracle, tmp_path)
    old = edit_config(tmp_path, remove=("rope_parameters", "dtype"), torch_dtype="float32", **old_fields)
    assert "rope_parameters" not in old.hf_config
    assert_matches(load(old), oracle)


def test_fields_that_old_configurations_lack_have_their_usual_values(tmp_path: Path) -> None:
    oracle = tiny_model("llama", num_key_value_heads=4)
    save_checkpoint(oracle, tmp_path)
    lacking = ("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "rope_parameters", "hidden_act")
    assert_matches(load(edit_config(tmp_path, remove=(*lacking, "tie_word_embeddings"))), oracle)


@pytest.mark.parametrize("max_window_layers", [0, 1, 2])
def test_max_window_layers_decides_where_no_layer_types_are_given(tmp_path: Path, max_window_layers: int) -> None:
    window = {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": max_window_layers}
    oracle = tiny_model("qwen2", **window)
    save_checkpoint(oracle, tmp_path)
    assert_matches(load(edit_config(tmp_path, remove=("layer_types",))), oracle)


def test_mistral_without_the_field_has_a_window_of_4096(tmp_path: Path) -> None:
    save_checkpoint(tiny_model("mistral"), tmp_path)
    model = load(edit_config(tmp_path, remove=("sliding_window",)))
    windows = {module.layer.sliding_window for module in model.modules() if hasattr(module, "layer")}
    assert windows == {4096}


@pytest.mark.one_case_quick
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {"head_dim": 32}),
        ("phi3", {}),
        ("gemma2", {"sliding_window": 9, **CAPS}),
        ("gemma3", {"sliding_window": 9, "hidden_size": 48}),
        ("gpt2", {}),
        ("olmo2", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_low_precision_gives_float32_logits_close_to_transformers(
    tmp_path: Path, family: str, overrides: dict[str, Any], dtype: torch.dtype
) -> None:
    oracle = tiny_model(family, **overrides)
    model = load(save_checkpoint(oracle, tmp_path), dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    low_precision = oracle.to(dtype)
    for tokens, logits in zip(SEQUENCES, sequence_logits(model, SEQUENCES), strict=True):
        assert logits.dtype == torch.float32
        error = (logits - oracle_logits(low_precision, tokens)).abs().mean()
        assert error < 0.05 * logits.std()


def test_sequences_of_one_step_do_not_see_each_other(tmp_path: Path) -> None:
    model = load(save_checkpoint(tiny_model("qwen2"), tmp_path))
    together = sequence_logits(model, SEQUENCES)
    alone = [sequence_logits(model, [sequence])[0] for sequence in SEQUENCES]
    for joint, single in zip(together, alone, strict=True):
        torch.testing.assert_close(joint, single, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "olmo2"])
def test_the_model_runs_without_tokens_or_logits_rows(tmp_path: Path, family: str) -> None:
    save_checkpoint(tiny_model(family), tmp_path)
    model = load(load_config(tmp_path))
    assert model.compute_logits(torch.empty(0, 64), NO_CONTEXT).shape == (0, VOCAB_SIZE)
