"""Whole engines with latent attention: its cache, its drafter, and everything that reads the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from penstock.contract import MLAAttentionSpec, SamplingParams
from penstock.errors import UnsupportedArgument
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
        folder, **options, kv_cache_memory_bytes=bytes_to_serve(groups, 72, 8) + 2 * bytes_per_block(groups)
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
    (tensor, *_), (group,) = core.kv_cache_config.tensors, core.kv_cache_config.groups
    assert group.spec.page_size_bytes == 16 * LATENT * num_bytes
    assert tensor.size_bytes == core.kv_cache_config.num_blocks * group.spec.page_size_bytes
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
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' with DeepseekV3ForCausalLM"),
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
