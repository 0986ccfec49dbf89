"""Workers and cores that are killed in and after updates of weights: nothing older than these is served."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import penstock
from penstock import AsyncEngine, SamplingParams
from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.processes.core_group import CoreGroup
from penstock.errors import PenstockError, WeightTransferFailed
from penstock.worker.worker import Worker
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run

pytestmark = [pytest.mark.slow, pytest.mark.one_path(reason="both paths read the same memory")]
PROMPTS = random_prompts([5, 21], 97)
DEMO: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": "16MiB", "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def tokens(core: EngineCore) -> list[list[int]]:
    return [result.tokens for result in run(core, PROMPTS, greedy(10))]


def load(core: EngineCore, items: list[tuple[str, Any]]) -> None:
    core.collective_rpc(RpcCall("load_weights", (items,)))


def kill_last_rank(core: EngineCore) -> None:
    os.kill(core._executor.process_ids[-1], signal.SIGKILL)  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_kept", [False, True], ids=["undefined", "keep"])
def test_a_killed_worker(folders: tuple[Path, Path], tmp_path: Path, is_kept: bool) -> None:
    fresh = make_core(folders[1])
    expected = tokens(fresh)
    fresh.close()
    kept = {"backend": "files", "recovery": "keep", "recovery_dir": str(tmp_path)} if is_kept else None
    core = make_core(folders[0], tensor_parallel_size=2, weight_transfer_config=kept)
    try:
        before = tokens(core)
        items = list(load_file(folders[1] / "model.safetensors").items())
        load(core, items[:7])
        kill_last_rank(core)
        # No update was complete: the weights of the start are the newest ones.
        assert tokens(core) == before
        with pytest.raises(WeightTransferFailed, match="Send all tensors again"):
            load(core, items)
        load(core, items)
        assert tokens(core) == expected
        kill_last_rank(core)
        if is_kept:
            assert tokens(core) == expected
            return
        results = {"r": Result()}
        add(core, "r", PROMPTS[0], greedy(10))
        until = time.monotonic() + 15
        while core.num_worker_restarts < 2 and time.monotonic() < until:
            assert core.step() == []
        for _ in range(20):
            assert core.step() == []
        assert core.stats().state.name == "weights undefined"
        load(core, items)
        finish(core, results)
        assert results["r"].tokens == expected[0]
    finally:
        core.close()


class LoadAndDie:
    """Function for workers that loads weights, and ends the process of the last rank."""

    def __init__(self, items: list[tuple[str, Any]]) -> None:
        self.items = items

    def __call__(self, worker: Worker) -> None:
        worker.get_model().load_weights(self.items)
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("num_items", [7, None])
def test_a_function_that_loses_a_worker_leaves_the_weights_of_before_it_on_all_ranks(
    folders: tuple[Path, Path], num_items: int | None
) -> None:
    core = make_core(folders[0], tensor_parallel_size=2)
    items = list(load_file(folders[1] / "model.safetensors").items())
    try:
        before = tokens(core)
        with pytest.raises(PenstockError):
            core.collective_rpc(RpcCall(LoadAndDie(items[:num_items])))
        assert tokens(core) == before
        assert core.stats().weight_version == 0
        load(core, items)
        assert tokens(core) != before
    finally:
        core.close()


@pytest.mark.parametrize("is_kept", [False, True], ids=["undefined", "keep"])
def test_a_killed_core(tmp_path: Path, is_kept: bool) -> None:
    kept = {"backend": "files", "recovery": "keep", "recovery_dir": str(tmp_path)} if is_kept else None
    folder = Path(penstock.__file__).parent / "assets" / "demo"
    pairs = [(name, tensor * 1.05 if tensor.dim() > 1 else tensor) for name, tensor in _stored(folder)]

    async def use() -> None:
        engine = AsyncEngine("demo", **DEMO, enable_multiprocessing=True, weight_transfer_config=kept)
        try:
            core = engine._dispatcher.core
            assert isinstance(core, CoreGroup)
            old = await said(engine)
            await engine.load_weights(pairs)
            new = await said(engine)
            assert new != old
            (pid,) = core.process_ids
            os.kill(pid, signal.SIGKILL)
            waiting = asyncio.ensure_future(said(engine))
            if not is_kept:
                while core.status().stats.state.name != "weights undefined":
                    await asyncio.sleep(0.05)
                assert not waiting.done()
                while True:
                    try:
                        await engine.load_weights(pairs)
                        break
                    except PenstockError:
                        await asyncio.sleep(0.1)
            assert await waiting == new
            assert core.process_ids != [pid]
        finally:
            engine.shutdown()

    asyncio.run(use())


def _stored(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return [item for file in sorted(folder.glob("*.safetensors")) for item in load_file(file).items()]


async def said(engine: AsyncEngine) -> list[int]:
    async for output in engine.generate("ROMEO:", GREEDY):
        last = output
    return list(last.outputs[0].token_ids)
