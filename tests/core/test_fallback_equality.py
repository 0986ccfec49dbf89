"""Models that run through Transformers give its greedy tokens and log-probabilities, however the work is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.contract import FullAttentionSpec
from penstock.scheduler.kv_cache_plan import bytes_per_block, bytes_to_serve
from support.checkpoints import VOCAB_SIZE
from support.engines import assert_greedy_continuation, greedy, make_core, random_prompts, run
from support.transformers_models import FAMILIES, PLANNED_BY_BUILDING, save_for_fallback, tiny_transformers_model

LENGTHS = (1, 3, 40, 17, 33, 8)
NUM_TOKENS = 12
EVERY_FAMILY = {**FAMILIES, **PLANNED_BY_BUILDING}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked prefill, small blocks": {"max_num_batched_tokens": 13, "block_size": 3},
    "asynchronous": {"async_scheduling": True, "max_num_batched_tokens": 40},
}


# Variants whose requests are preempted: one of each family, which takes a while.
PREEMPTED = [
    "gpt-neox",
    "stablelm",
    "granite",
    "starcoder2-window",
    "cohere2",
    "smollm3-window",
    "glm4",
    "phi",
    "gptj",
    "codegen",
    "opt",
]


@pytest.fixture(scope="module", params=EVERY_FAMILY)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return make_model(request.param, tmp_path_factory.mktemp("model"))


def make_model(name: str, folder: Path) -> tuple[Any, Path]:
    class_name, overrides = EVERY_FAMILY[name]
    oracle = tiny_transformers_model(class_name, **overrides)
    save_for_fallback(oracle, folder)
    return oracle, folder


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.one_case_quick
def test_mixed_prompts(model: tuple[Any, Path], setting: str) -> None:
    oracle, folder = model
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    core = make_core(folder, model_impl="transformers", **SETTINGS[setting])
    for prompt, result in zip(prompts, run(core, prompts, greedy(NUM_TOKENS, logprobs=3)), strict=True):
        assert len(result.tokens) == len(result.logprobs) == NUM_TOKENS
        assert_greedy_continuation(oracle, prompt, result)
    core.close()


@pytest.mark.one_case_quick
def test_prefix_hits(model: tuple[Any, Path]) -> None:
    oracle, folder = model
    shared = random_prompts([37], VOCAB_SIZE, seed=5)[0]
    prompts = [shared + tail for tail in random_prompts([1, 4, 9], VOCAB_SIZE, seed=6)]
    core = make_core(folder, model_impl="transformers", block_size=4)
    assert run(core, [shared], greedy(4))[0].num_cached_tokens == 0
    for prompt, result in zip(prompts, run(core, prompts, greedy(NUM_TOKENS, logprobs=2)), strict=True):
        assert result.num_cached_tokens >= 32
        assert_greedy_continuation(oracle, prompt, result)
    core.close()


@pytest.mark.parametrize("name", PREEMPTED)
@pytest.mark.one_case_quick
def test_preemption_under_a_tiny_kv_cache(name: str, tmp_path: Path) -> None:
    oracle, folder = make_model(name, tmp_path)
    options = {
        "model_impl": "transformers",
        "block_size": 4,
        "max_model_len": 72,
        "max_num_batched_tokens": 8,
        "async_scheduling": True,
    }
    core = make_core(folder, **options)
    groups = core.kv_cache_config.groups
    core.close()
    barely_enough = bytes_to_serve(groups, 72, 8) + 2 * bytes_per_block(groups, 0)
    core = make_core(folder, **options, kv_cache_memory_bytes=barely_enough)
    prompts = random_prompts((20, 31, 17, 25, 40, 6), VOCAB_SIZE, seed=7)
    results = run(core, prompts, greedy(30, logprobs=1))
    # Where every layer has a window, a request needs no more blocks as it grows, so it waits rather than gives way.
    if any(isinstance(group.spec, FullAttentionSpec) for group in groups):
        assert sum(result.num_preemptions for result in results) > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.tokens) == 30
        assert_greedy_continuation(oracle, prompt, result)
    core.close()


def test_two_engines_of_one_family_do_not_know_of_each_other(tmp_path: Path) -> None:
    class_name, overrides = FAMILIES["stablelm"]
    oracles = [tiny_transformers_model(class_name, seed=seed, **overrides) for seed in (1, 2)]
    for index, oracle in enumerate(oracles):
        save_for_fallback(oracle, tmp_path / str(index))
    cores = [make_core(tmp_path / str(index), model_impl="transformers") for index in (0, 1)]
    prompts = random_prompts((5, 30), VOCAB_SIZE)
    for _ in range(2):
        for core, oracle in zip(cores, oracles, strict=True):
            for prompt, result in zip(prompts, run(core, prompts, greedy(6)), strict=True):
                assert_greedy_continuation(oracle, prompt, result)
    cores[0].close()
    assert_greedy_continuation(oracles[1], prompts[0], run(cores[1], prompts[:1], greedy(6))[0])
    cores[1].close()
