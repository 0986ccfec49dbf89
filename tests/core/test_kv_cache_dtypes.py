"""Engines whose KV cache is smaller than float32: tokens depend on nothing but the request, and stay near the exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.contract import SamplingParams
from penstock.engine.planning.plan import plan_engine
from penstock.errors import ConfigError, UnsupportedFeature
from penstock.kernels.native import NATIVE
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import Result, greedy, make_core, random_prompts, run

pytestmark = pytest.mark.processor
needs_kernels = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")
SHARED = random_prompts([24], VOCAB_SIZE, seed=2)[0]
PROMPTS = [SHARED + tail for tail in random_prompts((5, 21, 1, 40, 13, 8), VOCAB_SIZE, seed=3)]
PARAMS = greedy(20, logprobs=2)
# Sampling shows the smallest difference of a logit sooner or later.
SAMPLED = [SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(path)
    return path


def _alone(folder: Path, dtype: str, params: list[SamplingParams]) -> list[Result]:
    core = make_core(folder, kv_cache_dtype=dtype, enable_prefix_caching=False, max_num_batched_tokens=512)
    results = [run(core, [prompt], one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    core.close()
    return results


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.each_value_quick
def test_tokens_are_the_same_in_a_batch_in_chunks_after_a_prefix_hit_and_after_preemption(
    folder: Path, dtype: str
) -> None:
    expected = [result.tokens for result in _alone(folder, dtype, SAMPLED)]
    for options in (
        {},
        {"max_num_batched_tokens": 7},
        {"async_scheduling": True, "block_size": 5},
    ):
        core = make_core(folder, kv_cache_dtype=dtype, **options)
        for _ in range(2):  # the second time from the prefix cache
            assert [result.tokens for result in run(core, PROMPTS, SAMPLED)] == expected
        core.close()
    probe = make_core(folder, kv_cache_dtype=dtype)
    block_bytes = probe.kv_cache_config.size_bytes // probe.kv_cache_config.pools[0].num_blocks
    probe.close()
    # Room for the longest request and little more.
    core = make_core(
        folder,
        kv_cache_dtype=dtype,
        max_model_len=96,
        kv_cache_memory_bytes=9 * block_bytes,
        enable_prefix_caching=False,
    )
    results = run(core, PROMPTS, SAMPLED)
    core.close()
    assert any(result.num_preemptions for result in results)
    assert [result.tokens for result in results] == expected


@needs_kernels
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.01), ("int8", 0.02)])
def test_log_probabilities_stay_near_those_of_a_float32_cache(folder: Path, dtype: str, tolerance: float) -> None:
    differences = []
    params = [PARAMS] * len(PROMPTS)
    for exact, rounded in zip(_alone(folder, "float32", params), _alone(folder, dtype, params), strict=True):
        for token_e, token_r, row_e, row_r in zip(
            exact.tokens, rounded.tokens, exact.logprobs, rounded.logprobs, strict=True
        ):
            differences.append(abs(row_e[token_e] - row_r.get(token_e, row_r[token_r])))
            if token_e != token_r:
                break
    assert 0 < sum(differences) / len(differences) < tolerance


@pytest.mark.parametrize(("dtype", "num_bytes"), [("auto", 4.0), ("float32", 4.0), ("bfloat16", 2.0), ("int8", None)])
def test_plan_and_engine_count_the_same_bytes(folder: Path, dtype: str, num_bytes: float | None) -> None:
    options: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 4 << 20, "max_model_len": 96}
    planned = plan_engine(str(folder), kv_cache_dtype=dtype, **options)
    layer = planned.layers[0]
    per_value = num_bytes or 1 + 4 / layer.head_size
    values = 2 * len(planned.layers) * layer.num_kv_heads * layer.head_size
    assert planned.kv_bytes_per_token == values * per_value
    assert planned.to_dict()["kv_cache"]["dtype"] == ("float32" if dtype == "auto" else dtype)
    if NATIVE is None and dtype == "int8":
        return
    core = make_core(folder, kv_cache_dtype=dtype, **options)
    assert core.kv_cache_config.size_bytes == planned.kv_cache.size_bytes
    assert core.kv_cache_config.pools[0].num_blocks == planned.kv_cache.pools[0].num_blocks
    core.close()


def test_a_dtype_that_is_not_known_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='int3'.*auto, float32, bfloat16, int8"):
        EngineConfig.create(str(folder), kv_cache_dtype="int3")


def test_int8_without_the_kernels_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedFeature, match=r"cpu_paged.*torch\.int8"):
        make_core(folder, kv_cache_dtype="int8", attention_backend="cpu_paged").close()
