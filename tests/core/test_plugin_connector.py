"""A KV connector as a plugin: blocks of waiting requests are loaded, and blocks of ended ones are saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.plugins import assert_equal, connector, write_checkpoint
from core.plugins.connector import STORE, ConnectorScheduler
from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from support.checkpoints import VOCAB_SIZE
from support.disturbed_workers import FailingWorker
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run

PROMPTS = random_prompts((5, 37, 1, 40, 13, 22), VOCAB_SIZE, seed=3)
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_num_batched_tokens": 256}
# Whole blocks of the prompts that do not have the last token, which must run.
NUM_STORED = 4 + 36 + 12 + 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    connector.register()
    return write_checkpoint(tmp_path_factory.mktemp("connected"), connector.ARCHITECTURE)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Result]:
    """Results without the connector."""
    core = make_core(folder, **OPTIONS, fast_paths="off")
    try:
        return run(core, PROMPTS, greedy(12, logprobs=2))
    finally:
        core.close()


@pytest.fixture(autouse=True)
def store() -> Iterator[None]:
    STORE.is_on, STORE.fails = True, False
    STORE.pages.clear()
    yield
    STORE.is_on = False


def side_of(core: EngineCore) -> ConnectorScheduler:
    return next(found for found in core.scheduler.features if isinstance(found, ConnectorScheduler))


def fill(folder: Path) -> None:
    """Let an engine serve the prompts with the connector, and end."""
    core = make_core(folder, **OPTIONS)
    run(core, PROMPTS, greedy(2))
    # The last step tells the workers of what has ended.
    core.step()
    assert side_of(core).num_loaded_tokens == 0
    assert core.scheduler.kv_cache.num_used_blocks == 0
    core.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_another_engine_goes_on_from_the_blocks_of_ended_requests(
    folder: Path, expected: list[Result], async_scheduling: bool
) -> None:
    fill(folder)
    core = make_core(folder, **OPTIONS, async_scheduling=async_scheduling)
    assert_equal(run(core, PROMPTS, greedy(12, logprobs=2)), expected)
    assert side_of(core).num_loaded_tokens == NUM_STORED
    core.scheduler.kv_cache.check_integrity()
    core.close()


def test_prompts_whose_load_fails_are_computed(folder: Path, expected: list[Result]) -> None:
    fill(folder)
    STORE.fails = True
    core = make_core(folder, **OPTIONS)
    assert_equal(run(core, PROMPTS, greedy(12, logprobs=2)), expected)
    assert side_of(core).num_loaded_tokens == 0
    core.close()


def test_a_request_that_is_aborted_during_its_load_gives_its_blocks_back_when_it_ends(
    folder: Path, expected: list[Result]
) -> None:
    fill(folder)
    core = make_core(folder, **OPTIONS)
    add(core, "gone", PROMPTS[1], greedy(12))
    add(core, "stays", PROMPTS[3], greedy(12, logprobs=2))
    results = {"stays": Result()}
    for output in core.step():
        results[output.req_id].take(output)
    core.abort_requests(["gone"])
    assert core.scheduler.kv_cache.num_used_blocks > 9
    finish(core, results)
    core.step()
    assert_equal([results["stays"]], [expected[3]])
    assert core.scheduler.kv_cache.num_used_blocks == 0
    core.close()


class FailingDuringLoads(FailingWorker):
    """Fails while blocks are loaded, once."""


@pytest.mark.parametrize("step", [1, 2, 6])
def test_requests_begin_anew_where_a_worker_fails_during_their_load(
    folder: Path, expected: list[Result], step: int
) -> None:
    fill(folder)
    FailingDuringLoads.fails_at = {("execute", step)}
    core = make_core(folder, **OPTIONS, worker_cls=f"{__name__}.FailingDuringLoads")
    assert_equal(run(core, PROMPTS, greedy(12, logprobs=2)), expected)
    assert not FailingDuringLoads.fails_at
    core.step()
    assert core.scheduler.kv_cache.num_used_blocks == 0
    core.close()


@pytest.mark.one_path(reason="recorded programs belong to the fast paths")
def test_a_hook_of_every_layer_is_a_cut_of_the_program(folder: Path, expected: list[Result]) -> None:
    core = make_core(folder, **OPTIONS)
    STORE.num_hooks = 0
    assert_equal(run(core, PROMPTS, greedy(12, logprobs=2)), expected)
    assert STORE.num_hooks == 2 * 12

    def segments(worker: Any) -> set[int]:
        recorded = worker.runner.execution.programs._recorded.values()
        return {0 if found is None else found.num_segments for found in recorded}

    # First, since programs are forgotten after a function that workers do not know.
    (text,) = core.collective_rpc(RpcCall("get_model_inspection"))
    assert "  in segments: 3 at most" in text.splitlines()
    assert core.collective_rpc(RpcCall(segments)) == [{3}]
    core.close()
