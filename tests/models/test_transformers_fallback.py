"""A model that runs through Transformers on paged attention gives the logits that it gives there."""

from __future__ import annotations

import dataclasses
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from penstock.attention import LayerAttention
from penstock.errors import CheckpointError, UnsupportedModel
from penstock.layers.linear import PackedMethod, weights_size_bytes
from penstock.models.attention_layers import attention_layers
from penstock.models.causal_lm import CausalLM
from support.checkpoints import VOCAB_SIZE, edit_config, load_config, oracle_logits, save_checkpoint, tiny_model
from support.model_sweep import tiny_model_of_type
from support.plain_attention import sequence_logits
from support.transformers_models import (
    FAMILIES,
    OWN_ATTENTION,
    PLANNED_BY_BUILDING,
    WIDER,
    load,
    save_for_fallback,
    tiny_transformers_model,
    wider_overrides,
)

_RANDOM = random.Random(0)
SEQUENCES = [[_RANDOM.randrange(VOCAB_SIZE) for _ in range(length)] for length in (23, 1, 60, 7)]


def assert_matches(model: CausalLM, oracle: PreTrainedModel) -> None:
    for tokens, logits in zip(SEQUENCES, sequence_logits(model, SEQUENCES), strict=True):
        expected = oracle_logits(oracle, tokens)
        assert expected.std() > 0.1, "logits this small would match anything"
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def tiny_family(name: str, seed: int = 0) -> PreTrainedModel:
    class_name, overrides = {**FAMILIES, **PLANNED_BY_BUILDING}[name]
    return tiny_transformers_model(class_name, seed=seed, **overrides)


def windows(model: CausalLM) -> list[int | None]:
    return [layer.sliding_window for layer in attention_layers(model).values()]


@pytest.mark.parametrize("name", [*FAMILIES, *PLANNED_BY_BUILDING])
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    oracle = tiny_family(name)
    assert_matches(load(save_for_fallback(oracle, tmp_path)), oracle)


@pytest.mark.slow
@pytest.mark.parametrize("class_name", WIDER)
def test_logits_of_many_more_equal_transformers(tmp_path: Path, class_name: str) -> None:
    oracle = tiny_transformers_model(class_name, **wider_overrides(class_name))
    assert_matches(load(save_for_fallback(oracle, tmp_path)), oracle)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}}),
        ("mistral", {"sliding_window": 9}),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_families_that_are_implemented_here_run_either_way(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    oracle = tiny_model(family, **overrides)
    # Transformers' "dynamic" has the frequencies of the longest sequence so far, and so of this length at most.
    options = {"max_model_len": oracle.config.max_position_embeddings}
    here = load(dataclasses.replace(save_checkpoint(oracle, tmp_path), **options))
    there = load(dataclasses.replace(save_for_fallback(oracle, tmp_path), **options))
    assert type(here) is not type(there)
    assert_matches(there, oracle)
    for one, other in zip(sequence_logits(here, SEQUENCES), sequence_logits(there, SEQUENCES), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_the_log_says_which_implementation_runs_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="penstock")
    config = save_checkpoint(tiny_model("llama"), tmp_path)
    load(config)
    load(dataclasses.replace(config, model_impl="transformers"))
    load(save_checkpoint(tiny_family("opt"), tmp_path / "opt"))
    assert [record.message for record in caplog.records if record.message.startswith("Implementation")] == [
        "Implementation: LlamaForCausalLM of Penstock",
        "Implementation: LlamaForCausalLM of Transformers on paged attention, as model_impl asks",
        "Implementation: OPTForCausalLM of Transformers on paged attention, since there is none here",
    ]


def test_penstocks_own_implementation_can_be_insisted_on(tmp_path: Path) -> None:
    config = dataclasses.replace(save_checkpoint(tiny_family("opt"), tmp_path), model_impl="penstock")
    with pytest.raises(UnsupportedModel, match=r"OPTForCausalLM.*model_impl='penstock'.*LlamaForCausalLM"):
        load(config)


def test_each_layers_attention_is_the_models(tmp_path: Path) -> None:
    model = load(save_for_fallback(tiny_family("granite"), tmp_path))
    expected = [
        LayerAttention(
            f"model.layers.{layer}.self_attn", num_heads=4, num_kv_heads=2, head_size=16, scale=pytest.approx(0.1)
        )
        for layer in range(2)
    ]
    assert list(attention_layers(model).values()) == expected


def test_windows_follow_a_pattern_of_the_models_own(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    oracle = tiny_transformers_model(
        "Cohere2ForCausalLM", num_hidden_layers=5, sliding_window=6, layer_types=kinds, logit_scale=0.5
    )
    model = load(save_for_fallback(oracle, tmp_path))
    assert windows(model) == [None, 6, 6, None, 6]
    assert_matches(model, oracle)


def test_soft_caps_on_attention_and_logits_are_the_models(tmp_path: Path) -> None:
    oracle = tiny_transformers_model(
        "Gemma2ForCausalLM",
        head_dim=32,
        sliding_window=7,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=3.0,
    )
    model = load(save_for_fallback(oracle, tmp_path))
    assert [layer.soft_cap for layer in attention_layers(model).values()] == [4.0, 4.0]
    assert windows(model) == [7, None]
    assert_matches(model, oracle)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    oracle = tiny_transformers_model("Starcoder2ForCausalLM", sliding_window=128)
    assert windows(load(save_for_fallback(oracle, tmp_path))) == [None, None]


def test_large_linear_layers_multiply_by_packed_weights(tmp_path: Path) -> None:
    oracle = tiny_transformers_model(
        "GraniteForCausalLM",
        hidden_size=512,
        intermediate_size=1100,
        attention_multiplier=0.05,
        tie_word_embeddings=True,
        vocab_size=1200,
    )
    model = load(save_for_fallback(oracle, tmp_path))
    packed = [name for name, module in model.named_modules() if isinstance(getattr(module, "method", 0), PackedMethod)]
    assert any("lm_head" in name for name in packed)
    assert any("gate_proj" in name for name in packed)
    assert_matches(model, oracle)


def test_models_of_one_family_share_nothing(tmp_path: Path) -> None:
    oracles = [tiny_family("stablelm", seed) for seed in (1, 2)]
    models = [load(save_for_fallback(oracle, tmp_path / str(i))) for i, oracle in enumerate(oracles)]
    for _ in range(2):
        for model, oracle in zip(models, oracles, strict=True):
            assert_matches(model, oracle)


def test_other_weights_can_be_loaded_into_the_same_model(tmp_path: Path) -> None:
    first, second = tiny_family("gpt-neox", 1), tiny_family("gpt-neox", 2)
    model = load(save_for_fallback(first, tmp_path))
    model.load_weights(second.state_dict().items())
    assert_matches(model, second)


def test_the_model_takes_its_weights_memory_once(tmp_path: Path) -> None:
    oracle = tiny_family("smollm3")
    model = load(save_for_fallback(oracle, tmp_path))
    # Our kernels pad the vocabulary of 97 to whole panels.
    assert weights_size_bytes(model) < 1.1 * sum(parameter.nbytes for parameter in oracle.parameters())


@pytest.mark.parametrize("name", ["gpt-neox", "opt", "starcoder2"])
def test_a_checkpoint_of_the_backbone_alone_has_shorter_names(tmp_path: Path, name: str) -> None:
    oracle = tiny_family(name)
    config = save_for_fallback(oracle, tmp_path)
    file = tmp_path / "model.safetensors"
    prefix = f"{oracle.base_model_prefix}."
    save_file({name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}, file)
    assert_matches(load(config), oracle)


def test_what_old_checkpoints_hold_beside_the_weights_is_ignored(tmp_path: Path) -> None:
    oracle = tiny_family("gpt-neox-sequential")
    config = save_for_fallback(oracle, tmp_path)
    file = tmp_path / "model.safetensors"
    old = {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8),
        "gpt_neox.layers.1.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.1.attention.rotary_emb.inv_freq": torch.ones(8),
        "embed_out.weight": oracle.state_dict()["gpt_neox.embed_in.weight"].clone(),
    }
    save_file({**load_file(file), **old}, file)
    assert_matches(load(config), oracle)


@pytest.mark.parametrize("class_name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_experts_load_from_one_tensor_each_and_from_one_for_all(tmp_path: Path, class_name: str) -> None:
    """The first is how most checkpoints were published, the second how Transformers keeps them in memory."""
    oracle = tiny_transformers_model(class_name, **wider_overrides(class_name))
    config = save_for_fallback(oracle, tmp_path)
    file = tmp_path / "model.safetensors"
    assert not any(name.endswith("experts.gate_up_proj") for name in load_file(file))
    assert_matches(load(config), oracle)
    stacked = {name: tensor.contiguous() for name, tensor in oracle.state_dict().items()}
    (layer, *_) = [name for name in stacked if name.endswith("experts.gate_up_proj")]
    save_file(stacked, file)
    assert_matches(load(config), oracle)
    save_file({**stacked, layer: stacked[layer][:, 1:].contiguous()}, file)
    with pytest.raises(CheckpointError, match=r"Misshapen: .*experts\.gate_up_proj \(has .*needs .*all experts of it"):
        load(config)
    save_file({name: tensor for name, tensor in stacked.items() if name != layer}, file)
    with pytest.raises(CheckpointError, match=r"missing: .*experts\.0\."):
        load(config)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config = save_for_fallback(tiny_family("stablelm"), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.strange.weight"] = weights.pop("model.layers.1.mlp.down_proj.weight")
    weights["model.norm.weight"] = torch.ones(65)
    save_file(weights, file)
    with pytest.raises(CheckpointError) as raised:
        load(config)
    for words in (
        "unexpected: model.layers.1.mlp.strange.weight",
        "missing: model.layers.1.mlp.down_proj.weight",
        "misshapen: model.norm.weight (has [65], needs [64])",
    ):
        assert words in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["glm4", "opt", "stablelm-norms"])
def test_low_precision_gives_float32_logits_close_to_transformers(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    oracle = tiny_family(name)
    model = load(save_for_fallback(oracle, tmp_path), dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    low_precision = oracle.to(dtype)
    for tokens, logits in zip(SEQUENCES, sequence_logits(model, SEQUENCES), strict=True):
        assert logits.dtype == torch.float32
        error = (logits - oracle_logits(low_precision, tokens)).abs().mean()
        assert error < 0.05 * logits.std()


def test_what_a_configuration_says_about_a_models_output_does_not_matter(tmp_path: Path) -> None:
    oracle = tiny_family("granite")
    save_for_fallback(oracle, tmp_path)
    config = edit_config(tmp_path, return_dict=False, use_cache=True, output_hidden_states=True)
    assert_matches(load(dataclasses.replace(config, model_impl="transformers")), oracle)


LONGROPE_PARAMETERS = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [3.0] * 8,
    "original_max_position_embeddings": 64,
}
LONGROPE = {"rope_parameters": LONGROPE_PARAMETERS, "original_max_position_embeddings": 64}


def test_short_requests_of_a_longrope_model_run_with_its_short_frequencies(tmp_path: Path) -> None:
    oracle = tiny_transformers_model("Phi3ForCausalLM", **LONGROPE)
    config = save_for_fallback(oracle, tmp_path)
    assert_matches(load(dataclasses.replace(config, max_model_len=64)), oracle)


@pytest.mark.parametrize("max_model_len", [None, "auto", 65])
def test_where_long_requests_of_a_longrope_model_are_served_all_run_with_its_long_frequencies(
    tmp_path: Path, max_model_len: int | str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the native family, which has the same logits, and as Transformers has them for nothing but long factors."""
    oracle = tiny_transformers_model("Phi3ForCausalLM", **LONGROPE)
    config = dataclasses.replace(save_for_fallback(oracle, tmp_path), max_model_len=max_model_len)
    model = load(config)
    assert "start with max_model_len=64 or less" in caplog.text
    long_factors = LONGROPE_PARAMETERS["long_factor"]
    always = {**LONGROPE, "rope_parameters": {**LONGROPE_PARAMETERS, "short_factor": long_factors}}
    assert_matches(model, tiny_transformers_model("Phi3ForCausalLM", **always))
    native = load(dataclasses.replace(config, model_impl="penstock"))
    both = zip(sequence_logits(model, SEQUENCES), sequence_logits(native, SEQUENCES), strict=True)
    for ours, theirs in both:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_a_configuration_that_transformers_does_not_take_is_refused(tmp_path: Path) -> None:
    save_for_fallback(tiny_family("granite"), tmp_path)
    config = dataclasses.replace(edit_config(tmp_path, hidden_size=[64]), model_impl="transformers")
    with pytest.raises(Exception, match=r"config\.json of .*GraniteForCausalLM.*hidden_size"):
        load(config)
    assert load_config(tmp_path).hf_config["hidden_size"] == [64]


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_families_that_compute_attention_by_themselves_run(tmp_path: Path, name: str) -> None:
    class_name, overrides = OWN_ATTENTION[name]
    # Falcon's "eager" adds ALiBi's biases twice.
    oracle = tiny_transformers_model(class_name, attention="sdpa" if "falcon" in name else "eager", **overrides)
    model = load(save_for_fallback(oracle, tmp_path))
    slopes = [layer.alibi_slopes for layer in attention_layers(model).values()]
    assert all((one is None) == (name in ("falcon", "falcon-multi-head", "falcon-new")) for one in slopes)
    assert_matches(model, oracle)


@pytest.mark.parametrize("class_name", ["GraniteSWAForCausalLM", "MiMoV2FlashForCausalLM"])
def test_attention_sinks_and_heads_of_different_sizes_are_the_models(tmp_path: Path, class_name: str) -> None:
    oracle = tiny_transformers_model(class_name, **wider_overrides(class_name))
    model = load(save_for_fallback(oracle, tmp_path))
    assert any(layer.sinks is not None for layer in attention_layers(model).values())
    assert_matches(model, oracle)


@pytest.mark.parametrize("model_impl", ["penstock", "transformers"])
@pytest.mark.parametrize("model_type", ["exaone", "sarvam_moe"])
def test_names_that_transformers_converts_back_when_it_loads_are_known(
    tmp_path: Path, model_type: str, model_impl: str
) -> None:
    oracle = tiny_model_of_type(model_type)
    config = dataclasses.replace(save_checkpoint(oracle, tmp_path), model_impl=model_impl)
    assert any("attention" in name and "self_attn" not in name for name in load_file(tmp_path / "model.safetensors"))
    assert_matches(load(config), oracle)
