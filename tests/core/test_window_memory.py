"""Layers with sliding windows take the memory of their windows while the engine runs, and the tokens do not show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.contract import FullAttentionSpec, SlidingWindowSpec
from penstock.scheduler.kv_cache_plan import blocks_per_request, bytes_per_block, bytes_to_serve
from support.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_model
from support.engines import Result, add, assert_greedy_continuation, greedy, make_core, random_prompts, run

LENGTH = 128
OPTIONS = {"block_size": 4, "max_model_len": LENGTH, "max_num_batched_tokens": 8, "enable_prefix_caching": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"num_hidden_layers": 4, "sliding_window": 9}),
    "gemma3": ("gemma3", {"num_hidden_layers": 6, "sliding_window": 16}),
    "phi3": ("phi3", {"sliding_window": 12}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    family, overrides = MODELS[request.param]
    folder = tmp_path_factory.mktemp("model")
    oracle = tiny_model(family, **overrides)
    save_checkpoint(oracle, folder)
    return oracle, folder


def test_a_request_never_holds_more_than_the_plan_says_and_windows_hold_less(model: tuple[Any, Path]) -> None:
    oracle, folder = model
    core = make_core(folder, **OPTIONS)
    groups = core.kv_cache_config.groups
    prompt = random_prompts([90], VOCAB_SIZE)[0]
    add(core, "r", prompt, greedy(30))
    result, most_held = Result(), [0] * len(groups)
    while core.has_unfinished_requests():
        for output in core.step():
            result.take(output)
        if core.scheduler.num_running:
            held = core.scheduler.kv_cache.get_block_ids("r")
            most_held = [max(most, sum(block != 0 for block in ids)) for most, ids in zip(most_held, held, strict=True)]
    assert_greedy_continuation(oracle, prompt, result)
    for group, held in zip(groups, most_held, strict=True):
        assert held <= group.spec.max_blocks_per_request(120, 8)
        if isinstance(group.spec, SlidingWindowSpec):
            assert held * 4 <= group.spec.sliding_window - 1 + 8 + 2 * 4
        else:
            assert held == 30
    assert core.scheduler.kv_cache.num_used_blocks == 0
    core.close()


@pytest.mark.each_value_quick
def test_the_longest_request_runs_in_the_memory_that_the_windows_leave_it(model: tuple[Any, Path]) -> None:
    oracle, folder = model
    core = make_core(folder, **OPTIONS)
    groups = core.kv_cache_config.groups
    core.close()
    num_bytes = bytes_to_serve(groups, LENGTH, 8)
    num_full = sum(isinstance(group.spec, FullAttentionSpec) for group in groups)
    assert blocks_per_request(groups, 0, LENGTH, 8) == num_full * 32 + sum(
        group.spec.max_blocks_per_request(LENGTH, 8) for group in groups if isinstance(group.spec, SlidingWindowSpec)
    )
    assert num_bytes < len(groups) * 32 * bytes_per_block(groups, 0), "without windows this would be too little"
    core = make_core(folder, **OPTIONS, kv_cache_memory_bytes=num_bytes)
    prompts = random_prompts([100, 64, 100], VOCAB_SIZE, seed=3)
    for prompt, result in zip(prompts, run(core, prompts, greedy(28)), strict=True):
        assert len(result.tokens) == 28
        assert_greedy_continuation(oracle, prompt, result)
    core.close()
