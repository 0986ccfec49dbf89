"""Whole engines with latent attention: its cache, its drafter, and everything that reads the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from penstock.config import ModelConfig
from penstock.contract import MLAAttentionSpec, SamplingParams
from penstock.errors import UnsupportedArgument
from penstock.models.registry import find_model_class
from penstock.parallel import ParallelState
from penstock.scheduler.kv_cache_plan import bytes_per_block, bytes_to_serve
from support.checkpoints import VOCAB_SIZE
from support.draft_heads import write_deepseek_mtp
from support.engines import Result, assert_greedy_continuation, greedy, make_core, random_prompts, run

PROMPTS = random_prompts((5, 21, 1, 40, 13, 8), VOCAB_SIZE, seed=3)
PARAMS = [
    greedy(20),
    SamplingParams(temperature=0.9, ignore_eos=True, seed=1, max_tokens=20, logprobs=2),
    greedy(16, logprobs=0),
    SamplingParams(temperature=0.9, ignore_eos=True, seed=2, max_tokens=18, presence_penalty=0.5, top_k=9),
    greedy(19),
    greedy(9, prompt_logprobs=1),
]
# Elements of a position: kv_lora_rank + qk_rope_head_dim.
LATENT = 24 + 8
MTP = {"method": "deepseek_mtp", "num_speculative_tokens": 3, "adaptive": False}

_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
_PUBLISHED: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
# Configurations beside published checkpoints, with fewer layers.
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": {
        **_PUBLISHED,
        "architectures": ["DeepseekV2ForCausalLM"],
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 2,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
    "DeepSeek-V3": {
        **_PUBLISHED,
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    },
}
PUBLISHED["Kimi-K2"] = {
    **PUBLISHED["DeepSeek-V3"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**_YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_those_of_transformers(name: str) -> None:
    config = ModelConfig("some/model", Path("nowhere"), Path("nowhere"), dict(PUBLISHED[name]), {}, max_model_len=1024)
    content = {field: value for field, value in PUBLISHED[name].items() if field != "quantization_config"}
    if content["model_type"] == "kimi_k2":  # which Transformers knows as DeepSeek V3
        content = {**content, "model_type": "deepseek_v3", "auto_map": {}}
    with torch.device("meta"):
        ours: Any = find_model_class(config)(config, ParallelState())
        oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content))
    # The correction of the choice of experts is a buffer there.
    buffers = [one for key, one in oracle.named_buffers() if key.endswith("e_score_correction_bias")]
    expected = sum(one.numel() for one in [*oracle.parameters(), *buffers])
    assert sum(parameter.numel() for parameter in ours.parameters()) == expected
    # It multiplies from both sides, so an adapter of it would be ignored.
    assert not any(module.endswith("kv_b_proj") for module in ours.modules_by_name())
    attention, theirs = ours.model.layers[0].self_attn.attn, oracle.model.layers[0].self_attn
    assert attention.layer.scale == pytest.approx(theirs.scaling)
    assert attention.get_kv_cache_spec(16, "bfloat16").page_size_bytes == 16 * (512 + 64) * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """DeepSeek V3 with an MTP layer; the oracle has the target's two layers."""
    folder = tmp_path_factory.mktemp("deepseek")
    oracle = write_deepseek_mtp(folder)
    del oracle.model.layers[2]
    return oracle, folder


def tokens_of(folder: Path, **options: Any) -> list[Result]:
    core = make_core(folder, **options)
    results = run(core, PROMPTS, PARAMS)
    core.close()
    return results


@pytest.fixture(scope="module")
def expected(model: tuple[PreTrainedModel, Path]) -> list[list[int]]:
    return [result.tokens for result in tokens_of(model[1])]


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"max_num_batched_tokens": 9, "max_num_seqs": 3},
        {"attention_backend": "reference", "fast_paths": "off"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ],
    ids=str,
)
@pytest.mark.one_case_quick
def test_mtp_drafts_change_no_token(
    model: tuple[PreTrainedModel, Path], expected: list[list[int]], options: dict[str, Any]
) -> None:
    core = make_core(model[1], speculative_config=MTP, **options)
    (group,) = core.kv_cache_config.groups
    assert isinstance(group.spec, MLAAttentionSpec)
    assert len(group.layer_names) == 3
    assert [result.tokens for result in run(core, PROMPTS, PARAMS)] == expected
    core.close()


@pytest.mark.slow
def test_prefix_hits_and_preemption(model: tuple[PreTrainedModel, Path]) -> None:
    oracle, folder = model
    options = {"block_size": 4, "max_model_len": 72, "max_num_batched_tokens": 8}
    core = make_core(folder, **options)
    groups = core.kv_cache_config.groups
    core.close()
    core = make_core(
        folder, **options, kv_cache_memory_bytes=bytes_to_serve(groups, 72, 8) + 2 * bytes_per_block(groups, 0)
    )
    shared = random_prompts([17], VOCAB_SIZE, seed=5)[0]
    prompts = [shared + tail for tail in random_prompts([3, 14, 1, 8, 23, 6], VOCAB_SIZE, seed=7)]
    assert run(core, [shared], greedy(2))[0].num_cached_tokens == 0
    results = run(core, prompts, greedy(30, logprobs=1))
    assert sum(result.num_preemptions for result in results) > 0
    assert results[0].num_cached_tokens >= 16
    for prompt, result in zip(prompts, results, strict=True):
        assert_greedy_continuation(oracle, prompt, result)
    core.close()


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_cache_keeps_one_latent_per_position_and_layer(
    model: tuple[PreTrainedModel, Path], dtype: str, num_bytes: int
) -> None:
    core = make_core(model[1], kv_cache_dtype=dtype, block_size=16)
    (tensor, *_), (group,) = core.kv_cache_config.pools[0].tensors, core.kv_cache_config.groups
    assert group.spec.page_size_bytes == 16 * LATENT * num_bytes
    assert tensor.size_bytes == core.kv_cache_config.pools[0].num_blocks * group.spec.page_size_bytes
    core.close()


@pytest.mark.slow
def test_a_cache_in_bfloat16_costs_little_and_keeps_the_bits_of_a_batch(
    model: tuple[PreTrainedModel, Path],
) -> None:
    params = greedy(1, prompt_logprobs=0)
    core = make_core(model[1], kv_cache_dtype="bfloat16", enable_prefix_caching=False)
    together = run(core, PROMPTS, params)
    alone = [run(core, [prompt], params)[0] for prompt in PROMPTS]
    core.close()
    assert [one.prompt_logprobs for one in together] == [one.prompt_logprobs for one in alone]
    exact = make_core(model[1])
    wide = run(exact, PROMPTS, params)
    exact.close()
    pairs = [
        (found, right)
        for one, other in zip(together, wide, strict=True)
        for row, expected in zip(one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True)
        for found, right in zip(row.values(), expected.values(), strict=True)
    ]
    errors = [abs(found - right) for found, right in pairs]
    assert 0 < sum(errors) / len(errors) < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "DeepseekV3ForCausalLM with kv_cache_dtype='int8'"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode_context_parallel_size=2 with DeepseekV3ForCausalLM",
        ),
    ],
)
def test_what_is_missing_is_refused_by_name(
    model: tuple[PreTrainedModel, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedArgument, match=message):
        make_core(model[1], **options)
