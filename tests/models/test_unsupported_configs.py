"""Unsupported configurations are refused with the field's name, before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config import ModelConfig
from penstock.errors import ModelError, PenstockError, UnsupportedFeature, UnsupportedModel
from penstock.models.registry import find_model_class, supported_architectures
from penstock.parallel import ParallelState
from support.checkpoints import FAMILIES, RECURRENT, tiny_config


def config_of(family: str, **changes: Any) -> ModelConfig:
    architecture = {**FAMILIES, **RECURRENT}[family].architecture
    content = tiny_config(family).to_dict() | {"architectures": [architecture]} | changes
    return ModelConfig(
        model="some/model",
        folder=Path("nowhere"),
        tokenizer_folder=Path("nowhere"),
        hf_config={name: value for name, value in content.items() if value != "absent"},
        hf_generation_config={},
    )


def build(model_config: ModelConfig) -> None:
    find_model_class(model_config)(model_config, ParallelState())


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_the_unchanged_configuration_is_accepted(family: str) -> None:
    build(config_of(family))


@pytest.mark.parametrize(
    ("family", "changes", "error", "words"),
    [
        ("lfm2", {"layer_types": ["conv", "mamba", "conv", "conv"]}, UnsupportedFeature, ["layer_types", "mamba"]),
        ("lfm2", {"layer_types": "absent", "full_attn_idxs": [9]}, UnsupportedFeature, ["full_attn_idxs", "9"]),
        ("granitemoehybrid", {"mamba_d_head": 8}, ModelError, ["6 heads of 8"]),
        ("granitemoehybrid", {"mamba_n_groups": 4}, ModelError, ["4 groups"]),
        ("granitemoehybrid", {"time_step_limit": [1]}, UnsupportedFeature, ["time_step_limit"]),
        ("granitemoehybrid", {"hidden_act": "gelu"}, UnsupportedFeature, ["hidden_act", "gelu"]),
        ("bamba", {"attn_layer_indices": [7]}, UnsupportedFeature, ["attn_layer_indices", "7"]),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, ModelError, ["ssm_multipliers", "5 numbers"]),
        ("mamba", {"hidden_act": "gelu"}, UnsupportedFeature, ["hidden_act", "gelu"]),
        ("mamba", {"time_step_rank": "none"}, ModelError, ["time_step_rank", "none"]),
        ("jamba", {"hidden_act": "gelu"}, UnsupportedFeature, ["hidden_act", "gelu"]),
        ("jamba", {"attn_layer_offset": 3}, UnsupportedFeature, ["attn_layer_offset", "3", "attn_layer_period=3"]),
        ("mamba2", {"head_dim": 8}, ModelError, ["6 heads of 8"]),
        ("nemotron_h", {"layers_block_type": ["conv"]}, UnsupportedFeature, ["layers_block_type", "conv", "moe"]),
        ("nemotron_h_moe", {"num_experts_per_tok": 7}, ModelError, ["num_experts_per_tok=7", "n_routed_experts=6"]),
        ("zamba2", {"layers_block_type": "absent"}, UnsupportedFeature, ["layers_block_type", "hybrid"]),
        ("zamba2", {"num_key_value_heads": 2}, UnsupportedFeature, ["num_key_value_heads=2", "adapters"]),
        ("zamba2", {"n_mamba_heads": 5}, ModelError, ["5 heads of 25"]),
        ("recurrent_gemma", {"block_types": ["mamba"]}, UnsupportedFeature, ["block_types", "mamba", "recurrent"]),
        ("recurrent_gemma", {"lru_width": 81}, ModelError, ["lru_width=81", "num_attention_heads=4"]),
        (
            "nemotron_h",
            {"layers_block_type": "absent", "hybrid_override_pattern": "MX"},
            UnsupportedFeature,
            ["hybrid_override_pattern", "MX"],
        ),
        ("llama", {"hidden_act": "mish"}, UnsupportedFeature, ["hidden_act", "mish", "silu"]),
        ("llama", {"quantization_config": {"quant_method": "hqq"}}, UnsupportedFeature, ["hqq", "some/model"]),
        ("llama", {"rope_parameters": {"rope_type": "axial"}}, UnsupportedFeature, ["axial", "longrope"]),
        ("llama", {"rope_scaling": {"type": "su"}}, UnsupportedFeature, ["su", "llama3"]),
        ("llama", {"partial_rotary_factor": 0.5}, UnsupportedFeature, ["partial_rotary_factor", "0.5"]),
        ("llama", {"rope_parameters": {"full_attention": {}}}, UnsupportedFeature, ["full_attention"]),
        ("llama", {"rope_parameters": [1]}, ModelError, ["rope_parameters", "[1]"]),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, ModelError, ["factor", "linear"]),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": -1}}, ModelError, ["factor", "-1"]),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, ModelError, ["factor", "'4'"]),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, ModelError, ["rope_theta"]),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            ModelError,
            ["low_freq_factor"],
        ),
        ("llama", {"num_key_value_heads": 3}, UnsupportedFeature, ["num_key_value_heads=3", "4"]),
        ("llama", {"head_dim": 15}, UnsupportedFeature, ["head_dim=15"]),
        ("llama", {"attention_bias": "yes"}, ModelError, ["attention_bias", "'yes'"]),
        ("mistral", {"layer_types": ["full_attention"] * 2}, UnsupportedFeature, ["layer_types"]),
        ("mistral", {"sliding_window": "wide"}, ModelError, ["sliding_window", "wide"]),
        ("qwen2", {"layer_types": ["full_attention"]}, ModelError, ["layer_types", "2"]),
        ("qwen2", {"layer_types": ["linear_attention"] * 2}, UnsupportedFeature, ["linear_attention"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, UnsupportedFeature, ["use_sliding_window"]),
        ("phi3", {"attention_bias": True}, UnsupportedFeature, ["attention_bias", "Phi3ForCausalLM"]),
        ("phi3", {"lm_head_bias": True}, UnsupportedFeature, ["lm_head_bias"]),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 2}}, ModelError, ["partial_rotary_factor=2", "1]"]),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.2}}, UnsupportedFeature, ["0.2", "3", "16"]),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, ModelError, ["short_factor=None", "8"]),
        (
            "phi3",
            {"rope_parameters": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
            ModelError,
            ["long_factor=[1.0, ", "8 positive numbers"],
        ),
        ("gemma2", {"use_bidirectional_attention": True}, UnsupportedFeature, ["use_bidirectional_attention"]),
        ("gemma2", {"num_key_value_heads": None}, ModelError, ["num_key_value_heads"]),
        ("gemma2", {"query_pre_attn_scalar": 0}, ModelError, ["query_pre_attn_scalar=0"]),
        ("gemma2", {"attn_logit_softcapping": -50.0}, ModelError, ["attn_logit_softcapping=-50.0"]),
        ("gemma2", {"final_logit_softcapping": True}, ModelError, ["final_logit_softcapping=True"]),
        ("gemma2", {"hidden_activation": "relu2"}, UnsupportedFeature, ["hidden_activation", "relu2", "tanh"]),
        ("gemma2", {"sliding_window": None}, UnsupportedFeature, ["sliding_window", "sliding_attention"]),
        ("gemma2", {"layer_types": ["chunked_attention"] * 2}, UnsupportedFeature, ["chunked_attention"]),
        ("gemma3", {"attn_logit_softcapping": 50.0}, UnsupportedFeature, ["attn_logit_softcapping=50.0"]),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}}, ModelError, ["rope_type", "full_attention"]),
        ("gemma3", {"rope_parameters": {"full_attention": [1]}}, ModelError, ["full_attention", "[1]"]),
        ("gemma3", {"rope_scaling": [1]}, ModelError, ["rope_scaling", "[1]"]),
        ("gemma3", {"rope_parameters": None, "rope_local_base_freq": 0}, ModelError, ["rope_local_base_freq=0"]),
        ("gpt2", {"add_cross_attention": True}, UnsupportedFeature, ["add_cross_attention"]),
        ("gpt2", {"activation_function": "mish"}, UnsupportedFeature, ["activation_function", "gelu_new"]),
        (
            "qwen2",
            {"num_attention_heads": 2**20},
            UnsupportedFeature,
            ["num_attention_heads=1048576", "hidden_size=64"],
        ),
        ("gpt2", {"n_head": 5}, UnsupportedFeature, ["n_head=5", "64"]),
        ("gpt2", {"n_positions": "absent", "max_position_embeddings": "absent"}, ModelError, ["n_positions"]),
        ("gpt2", {"quantization_config": {"quant_method": "hqq"}}, UnsupportedFeature, ["hqq"]),
        ("olmo2", {"hidden_act": "mish"}, UnsupportedFeature, ["hidden_act", "mish"]),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, UnsupportedFeature, ["use_qk_norm=False", "True"]),
        ("hunyuan_v1_dense", {"use_cla": True}, UnsupportedFeature, ["use_cla=True", "False"]),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": {"rope_type": "dynamic", "alpha": -1.0}},
            ModelError,
            ["alpha=-1.0", "dynamic"],
        ),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": -1, "layer_types": None}, ModelError, ["-1"]),
    ],
    ids=str,
)
def test_a_value_that_no_model_can_honour_is_named(
    family: str, changes: dict[str, Any], error: type[PenstockError], words: list[str]
) -> None:
    with pytest.raises(error) as raised:
        build(config_of(family, **changes))
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ModelError, match=field):
        build(config_of("llama", **{field: "absent"}))


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel) as raised:
        build(config_of("llama", architectures=["Foo2ForCausalLM"], model_type="foo2"))
    for word in ("Foo2ForCausalLM", "foo2", *supported_architectures()):
        assert word in str(raised.value)
