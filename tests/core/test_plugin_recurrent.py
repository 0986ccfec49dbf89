"""A recurrent layer as a plugin, with a state in pages of its own kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.plugins import CIRCUMSTANCES, assert_equal, install_plugin, running_sum, write_checkpoint
from penstock.contract import RpcCall
from support.checkpoints import VOCAB_SIZE
from support.disturbed_workers import FailingWorker
from support.engines import Result, greedy, make_core, random_prompts, run

PROMPTS = random_prompts((5, 37, 1, 40, 13, 22), VOCAB_SIZE, seed=3)
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    running_sum.register()
    return write_checkpoint(tmp_path_factory.mktemp("recurrent"), running_sum.ARCHITECTURE)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Result]:
    """Each request by itself, in one chunk, layer by layer."""
    core = make_core(folder, **OPTIONS, fast_paths="off", enable_prefix_caching=False)
    try:
        return [run(core, [prompt], greedy(20, logprobs=2))[0] for prompt in PROMPTS]
    finally:
        core.close()


@pytest.mark.parametrize("options", CIRCUMSTANCES, ids=str)
@pytest.mark.each_value_quick
def test_tokens_and_bits_are_those_of_requests_alone(
    folder: Path, alone: list[Result], options: dict[str, Any]
) -> None:
    core = make_core(folder, **OPTIONS, **options)
    assert_equal(run(core, PROMPTS, greedy(20, logprobs=2)), alone)
    if "kv_cache_memory_bytes" in options:
        assert core.scheduler.num_preemptions > 0
    core.close()


def test_a_request_goes_on_from_a_cached_prefix(folder: Path) -> None:
    prompt = PROMPTS[1]
    core = make_core(folder, **OPTIONS)
    first = run(core, [prompt, prompt], greedy(12, logprobs=1))
    again = run(core, [prompt, [*prompt, 7, 8, 9]], greedy(12, logprobs=1))
    assert [result.num_cached_tokens for result in again] == [36, 36]
    assert first[0].logprobs == first[1].logprobs == again[0].logprobs
    core.close()


@pytest.mark.one_path(reason="recorded programs belong to the fast paths")
def test_the_layer_cuts_a_program_in_two(folder: Path) -> None:
    core = make_core(folder, **OPTIONS)
    run(core, PROMPTS[:2], greedy(6))

    def segments(worker: Any) -> set[int]:
        return {
            0 if found is None else found.num_segments for found in worker.runner.execution.programs._recorded.values()
        }

    assert core.collective_rpc(RpcCall(segments)) == [{2}]
    core.close()


class FailingOnce(FailingWorker):
    """Fails in its ninth step, once."""


def test_requests_go_on_in_a_worker_that_replaces_a_failed_one(folder: Path, alone: list[Result]) -> None:
    FailingOnce.fails_at = {("execute", 9)}
    core = make_core(folder, **OPTIONS, worker_cls=f"{__name__}.FailingOnce")
    assert_equal(run(core, PROMPTS, greedy(20, logprobs=2)), alone)
    assert not FailingOnce.fails_at
    core.close()


@pytest.mark.slow
def test_ranks_of_a_tensor_parallel_group_keep_equal_sums(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, monkeypatch, "running_sum")
    results = []
    for fast_paths in ("auto", "off"):
        core = make_core(folder, **OPTIONS, tensor_parallel_size=2, fast_paths=fast_paths)
        results.append(run(core, PROMPTS, greedy(12, logprobs=2)))
        core.close()
    assert_equal(*results)
