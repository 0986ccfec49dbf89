"""An adapter per request as a plugin: a part of the request, an owner of per-slot state and a named step input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from core.plugins import CIRCUMSTANCES, adapter, assert_equal, install_plugin, write_checkpoint
from penstock.contract import Parts, RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.worker.changes_model import keeps_model
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE
from support.engines import Result, add, finish, greedy, make_core, random_prompts

PROMPTS = random_prompts((5, 37, 1, 40, 13, 22), VOCAB_SIZE, seed=3)
ADAPTERS = [1, 0, 2, 3, 0, 1]
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    adapter.register()
    return write_checkpoint(tmp_path_factory.mktemp("adapted"), adapter.ARCHITECTURE)


def run(
    core: EngineCore, prompts: Sequence[Sequence[int]], adapter_ids: Sequence[int], max_tokens: int = 20
) -> list[Result]:
    for index, (prompt, adapter_id) in enumerate(zip(prompts, adapter_ids, strict=True)):
        parts = Parts.of([adapter.AdapterPart(adapter_id=adapter_id)]) if adapter_id else None
        add(core, f"r{index}", prompt, greedy(max_tokens, logprobs=2), parts=parts)
    results: dict[str, Result] = {}
    finish(core, results)
    return [results[f"r{index}"] for index in range(len(prompts))]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Result]:
    """Each request by itself, layer by layer."""
    core = make_core(folder, **OPTIONS, fast_paths="off", enable_prefix_caching=False)
    try:
        return [run(core, [prompt], [one])[0] for prompt, one in zip(PROMPTS, ADAPTERS, strict=True)]
    finally:
        core.close()


@pytest.mark.parametrize("options", CIRCUMSTANCES, ids=str)
def test_mixed_batches_have_the_bits_of_requests_alone(
    folder: Path, alone: list[Result], options: dict[str, Any]
) -> None:
    core = make_core(folder, **OPTIONS, **options)
    assert_equal(run(core, PROMPTS, ADAPTERS), alone)
    if "kv_cache_memory_bytes" in options:
        assert core.scheduler.num_preemptions > 0
    core.close()


def test_an_adapter_changes_what_is_generated(alone: list[Result], folder: Path) -> None:
    core = make_core(folder, **OPTIONS)
    without = run(core, PROMPTS, [0] * len(PROMPTS))
    core.close()
    for adapter_id, result, plain in zip(ADAPTERS, alone, without, strict=True):
        assert (result.logprobs == plain.logprobs) is (adapter_id == 0)


def test_cached_prefixes_are_shared_by_requests_of_one_adapter_alone(folder: Path) -> None:
    core = make_core(folder, **OPTIONS)
    run(core, [PROMPTS[1]], [1])
    same, other, none = (run(core, [PROMPTS[1]], [one])[0] for one in (1, 2, 0))
    assert (same.num_cached_tokens, other.num_cached_tokens, none.num_cached_tokens) == (36, 0, 0)
    core.close()


def test_an_adapter_that_is_not_there_ends_its_request_alone(folder: Path, alone: list[Result]) -> None:
    core = make_core(folder, **OPTIONS)
    results = run(core, PROMPTS[:3], [1, 9, 2])
    assert results[1].error is not None
    assert "adapter_id=9 is not loaded" in results[1].error
    assert_equal([results[0], results[2]], [alone[0], alone[2]])
    core.close()


class AdaptedWorker(Worker):
    """Answers calls that leave the model where it is, so that no program is forgotten."""

    @keeps_model
    def scale_adapters(self, factor: float) -> None:
        adapter.scale_adapters(self.runner.model, factor)

    @keeps_model
    def segments(self) -> dict[Any, int]:
        programs = self.runner.execution.programs._recorded
        return {key: 0 if found is None else found.num_segments for key, found in programs.items()}


@pytest.mark.one_path(reason="recorded programs belong to the fast paths")
def test_steps_stay_one_call_and_a_changed_table_records_nothing_anew(folder: Path) -> None:
    core = make_core(folder, **OPTIONS, enable_prefix_caching=False, worker_cls=f"{__name__}.AdaptedWorker")
    before = run(core, PROMPTS, ADAPTERS)
    without = run(core, PROMPTS, [0] * len(PROMPTS))
    (programs,) = core.collective_rpc(RpcCall("segments"))
    assert set(programs.values()) == {1}
    core.collective_rpc(RpcCall("scale_adapters", (0.5,)))
    changed = run(core, PROMPTS, ADAPTERS)
    assert changed[0].logprobs != before[0].logprobs
    assert changed[1].logprobs == without[1].logprobs
    core.collective_rpc(RpcCall("scale_adapters", (2.0,)))
    assert_equal(run(core, PROMPTS, ADAPTERS), before)
    assert core.collective_rpc(RpcCall("segments")) == [programs]
    core.close()


@pytest.mark.slow
def test_ranks_of_a_tensor_parallel_group_add_it_once(
    folder: Path, alone: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, monkeypatch, "adapter")
    results = []
    for fast_paths in ("auto", "off"):
        core = make_core(folder, **OPTIONS, tensor_parallel_size=2, fast_paths=fast_paths)
        results.append(run(core, PROMPTS, ADAPTERS))
        core.close()
    assert_equal(*results)
    for result, expected in zip(results[0], alone, strict=True):
        for row, other in zip(result.logprobs[:1], expected.logprobs[:1], strict=True):
            assert max(abs(row[token] - other[token]) for token in row.keys() & other.keys()) < 1e-3
