"""Mixtures of experts give Transformers' logits and tokens, however the work is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import LoadConfig
from penstock.errors import ModelError, UnsupportedFeature
from penstock.loader.loader import build_model, load_model
from penstock.parallel import ParallelState
from support.checkpoints import (
    MIXTURES,
    VOCAB_SIZE,
    edit_config,
    oracle_logits,
    save_checkpoint,
    tiny_checkpoint,
    tiny_config,
    tiny_model,
)
from support.engines import Result, assert_greedy_continuation, greedy, make_core, random_prompts, run
from support.plain_attention import sequence_logits
from support.ranks import contexts, run_ranks

_RANDOM = random.Random(0)
SEQUENCES = [[_RANDOM.randrange(VOCAB_SIZE) for _ in range(length)] for length in (23, 1, 60, 7)]
WHOLE_HEADS = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {}),
    ("mixtral", {"sliding_window": 9, "num_experts_per_tok": 1}),
    ("qwen2_moe", {}),
    ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": [1], "qkv_bias": False}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "head_dim": 32}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": True}),
    ("glm4_moe", {}),
    ("glm4_moe", {"use_qk_norm": True, "n_group": 1, "topk_group": 1, "attention_bias": True, "n_shared_experts": 2}),
    ("glm4_moe", {"norm_topk_prob": False, "first_k_dense_replace": 0, "rope_parameters": WHOLE_HEADS}),
    ("deepseek_v2", {}),
    ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 16.0}),
    ("deepseek_v2", {"rope_parameters": YARN, "first_k_dense_replace": 0, "attention_bias": True}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"rope_parameters": YARN, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
    ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None, "first_k_dense_replace": 2}),
    ("glm4_moe_lite", {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    ("gpt_oss", {}),
    ("gpt_oss", {"swiglu_alpha": 0.9, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True}),
    ("gpt_oss", {"attention_bias": False, "num_key_value_heads": 1, "num_experts_per_tok": 1}),
    ("dots1", {}),
    ("dots1", {"norm_topk_prob": False, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 0}),
    ("dots1", {"layer_types": ["sliding_attention", "full_attention"], "attention_bias": True}),
    ("ernie4_5_moe", {}),
    (
        "ernie4_5_moe",
        {"num_hidden_layers": 5, "moe_layer_interval": 2, "moe_layer_end_index": 3, "moe_num_shared_experts": 0},
    ),
    ("ernie4_5_moe", {"moe_norm_min": 0.4, "moe_layer_start_index": 0, "tie_word_embeddings": False}),
    ("hunyuan_v1_moe", {}),
    ("hunyuan_v1_moe", {"rope_parameters": WHOLE_HEADS, "moe_topk": [1, 1], "tie_word_embeddings": True}),
    ("hunyuan_v1_moe", {"attention_bias": True, "num_key_value_heads": 1, "head_dim": 32}),
    ("phimoe", {}),
    ("phimoe", {"router_jitter_noise": 0.01, "lm_head_bias": False, "tie_word_embeddings": True}),
    ("phimoe", {"attention_bias": False, "sliding_window": 9, "rope_parameters": WHOLE_HEADS}),
    ("granitemoe", {}),
    ("granitemoe", {"num_experts_per_tok": 4, "attention_bias": True, "tie_word_embeddings": True}),
    ("llama4", {}),
    (
        "llama4",
        {"attn_temperature_tuning": False, "use_qk_norm": False, "attention_bias": True, "num_experts_per_tok": 1},
    ),
    (
        "llama4",
        {"moe_layers": [0, 3], "attention_chunk_size": None, "no_rope_layers": None, "tie_word_embeddings": True},
    ),
    ("minimax_m2", {}),
    ("minimax_m2", {"rope_parameters": WHOLE_HEADS, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    ("olmoe", {}),
    ("olmoe", {"norm_topk_prob": True, "num_experts_per_tok": 6}),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked prefill, small blocks": {"max_num_batched_tokens": 13, "block_size": 3},
    "asynchronous": {"async_scheduling": True, "max_num_batched_tokens": 40},
    "n-gram speculation": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}
LENGTHS = (1, 3, 40, 17, 33, 8)
NUM_TOKENS = 12


def load(config: Any, parallel: ParallelState) -> Any:
    return load_model(config, LoadConfig(use_tqdm_on_load=False), parallel, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(("family", "overrides"), CONFIGS)
def test_logits_equal_transformers(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    oracle = tiny_model(family, **overrides)
    model = load(save_checkpoint(oracle, tmp_path), ParallelState())
    assert type(model).__name__ == MIXTURES[family].architecture
    for tokens, logits in zip(SEQUENCES, sequence_logits(model, SEQUENCES), strict=True):
        expected = oracle_logits(oracle, tokens)
        assert expected.std() > 0.3, "logits this small would match anything"
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", MIXTURES)
def test_two_ranks_have_the_logits_of_the_whole_model(family: str, tmp_path: Path) -> None:
    config = save_checkpoint(tiny_model(family, vocab_size=96), tmp_path)
    sequences = [[3, 14, 15, 92, 65, 35], [89, 79]]
    expected = sequence_logits(load(config, ParallelState()), sequences)
    ranks = [load(config, parallel) for parallel in contexts(2)]
    for logits in run_ranks(2, lambda rank: sequence_logits(ranks[rank], sequences)):
        assert not isinstance(logits, BaseException), logits
        for ours, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.one_case_quick
def test_an_engine_continues_as_transformers(family: str, setting: str, tmp_path: Path) -> None:
    oracle = tiny_model(family, vocab_size=96)
    save_checkpoint(oracle, tmp_path)
    prompts = random_prompts(LENGTHS, 96)
    core = make_core(tmp_path, **SETTINGS[setting])
    for prompt, result in zip(prompts, run(core, prompts, greedy(NUM_TOKENS, logprobs=3)), strict=True):
        assert_greedy_continuation(oracle, prompt, result)
    core.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.one_case_quick
def test_a_request_has_the_same_bits_alone_and_among_others(family: str, dtype: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family)
    prompts = random_prompts([5, 31, 33, 64, 2, 17, 80, 9], VOCAB_SIZE, seed=3)
    options = {"dtype": dtype, "logprobs_mode": "raw_logits", "max_logprobs": -1, "enable_prefix_caching": False}

    def serve(batch: list[list[int]], **more: Any) -> list[Result]:
        core = make_core(tmp_path, **options, **more)
        results = run(core, batch, greedy(6, logprobs=-1))
        core.close()
        return results

    alone = [serve([prompt])[0] for prompt in prompts]
    for results in (serve(prompts), serve(prompts, max_num_batched_tokens=24)):
        for one, other in zip(results, alone, strict=True):
            assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(("family", "layer"), [("qwen3_moe", 0), ("deepseek_v3", 1)])
@pytest.mark.each_value_quick
def test_experts_are_quantised_and_the_router_is_not(
    family: str, layer: int, quantization: str, tmp_path: Path
) -> None:
    config = save_checkpoint(tiny_model(family), tmp_path)
    rounded = load(type(config).load(str(tmp_path), quantization=quantization), ParallelState())
    exact = load(config, ParallelState())
    ours, theirs = (model.model.layers[layer].mlp for model in (rounded, exact))
    assert type(ours.experts[0].down_proj.method) is not type(theirs.experts[0].down_proj.method)
    assert type(ours.gate.method) is type(theirs.gate.method)
    ours, theirs = (torch.cat(sequence_logits(model, SEQUENCES)) for model in (rounded, exact))
    assert 0 < (ours - theirs).abs().mean() < 0.3 * theirs.std()


def test_configurations_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(ModelError, match=r"num_experts_per_tok=9. It must be at most num_(local_)?experts=6"):
        load(edit_config(tmp_path, num_experts_per_tok=9), ParallelState())
    with pytest.raises(UnsupportedFeature, match="mlp_only_layers='all'"):
        load(edit_config(tmp_path, num_experts_per_tok=2, mlp_only_layers="all"), ParallelState())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\].*num_hidden_layers=4 zeros and ones"),
        ({"attention_chunk_size": None}, "attention_chunk_size=None.*some layers are chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types=.*full_attention, chunked_attention"),
        ({"moe_layers": [4]}, r"moe_layers=\[4\].*below num_hidden_layers=4"),
    ],
)
def test_layers_that_llama4_does_not_have_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tiny_config("llama4").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedFeature, match=message):
        build_model(edit_config(tmp_path, architectures=["Llama4ForCausalLM"], **changes), ParallelState())
