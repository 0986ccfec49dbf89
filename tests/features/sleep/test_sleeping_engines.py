"""Engines in processes of their own that sleep: streams, lost workers and cores, several engines, and idle ones."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, AsyncEngine, SamplingParams
from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.processes.core_group import CoreGroup
from penstock.errors import EngineAsleep, WaitTimeout
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run
from support.sleepers import call, put_to_sleep, state_of, zeroed_weights
from support.waiting import is_running, wait_until

pytestmark = pytest.mark.one_path(reason="both paths read the same memory")
DEMO: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": "16MiB", "max_num_seqs": 8}
PLAYS = ["ROMEO:", "JULIET:", "First Citizen:\nWe", "KING"]
GREEDY = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, logprobs=1)
PROMPTS = random_prompts((5, 37, 1, 40), VOCAB_SIZE, seed=3)
PARAMS = greedy(12, logprobs=3)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with LLM("demo", **DEMO) as llm:
        return said(llm.generate(PLAYS, GREEDY, use_tqdm=False))


def said(outputs: list[RequestOutput]) -> list[Any]:
    return [(list(one.outputs[0].token_ids), _plain(one.outputs[0].logprobs)) for one in outputs]


def _plain(logprobs: Any) -> Any:
    return [{token: one.logprob for token, one in row.items()} for row in logprobs]


def values(results: list[Result]) -> list[Any]:
    return [(result.tokens, result.logprobs, result.error) for result in results]


def with_engine(use: Callable[[AsyncEngine], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        engine = AsyncEngine("demo", **{**DEMO, **options})
        try:
            await use(engine)
        finally:
            engine.shutdown()

    asyncio.run(main())


async def last_of(engine: AsyncEngine, prompt: str, begun: asyncio.Event | None = None) -> RequestOutput:
    async for output in engine.generate(prompt, GREEDY):
        if begun is not None and len(output.outputs[0].token_ids) > 3:
            begun.set()
    return output


async def running_streams(engine: AsyncEngine) -> list[asyncio.Task[RequestOutput]]:
    """Streams of all prompts, of which each has begun: what has not begun waits for the end of a pause."""
    begun = [asyncio.Event() for _ in PLAYS]
    streams = [
        asyncio.ensure_future(last_of(engine, prompt, event)) for prompt, event in zip(PLAYS, begun, strict=True)
    ]
    for event in begun:
        await event.wait()
    return streams


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_streams_go_on_after_a_sleep_that_keeps_them(expected: list[Any], in_process: bool) -> None:
    async def use(engine: AsyncEngine) -> None:
        streams = await running_streams(engine)
        await engine.sleep(mode="keep")
        assert await engine.is_sleeping()
        assert not any(stream.done() for stream in streams)
        with pytest.raises(WaitTimeout, match=r"4 requests have not ended within drain_timeout=0 s"):
            await engine.wait_for_requests_to_drain(0)
        await engine.check_health()
        await engine.wake_up()
        assert said(list(await asyncio.gather(*streams))) == expected
        await engine.wait_for_requests_to_drain()

    with_engine(use, enable_multiprocessing=not in_process)


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_streams_end_as_the_mode_of_a_pause_says(expected: list[Any], in_process: bool) -> None:
    async def use(engine: AsyncEngine) -> None:
        streams = await running_streams(engine)
        await engine.pause_generation(mode="wait")
        assert said(list(await asyncio.gather(*streams))) == expected
        late = asyncio.ensure_future(last_of(engine, PLAYS[0]))
        await asyncio.sleep(0.05)
        assert not late.done()
        await engine.resume_generation()
        assert said([await late]) == expected[:1]

        streams = await running_streams(engine)
        await engine.pause_generation()
        ends = await asyncio.gather(*streams)
        assert {end.outputs[0].finish_reason for end in ends} == {"abort"}
        with pytest.raises(EngineAsleep, match=r"takes no requests now \(paused \(abort\)\). Let it go on first"):
            await last_of(engine, PLAYS[0])
        assert await engine.is_paused()
        await engine.resume_generation()
        assert said([await last_of(engine, PLAYS[1])]) == expected[1:2]

    with_engine(use, enable_multiprocessing=not in_process)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_a_core_that_is_killed_while_it_sleeps_sleeps_on(expected: list[Any], level: int) -> None:
    async def use(engine: AsyncEngine) -> None:
        core = engine._dispatcher.core
        assert isinstance(core, CoreGroup)
        begun = asyncio.Event()
        stream = asyncio.ensure_future(last_of(engine, PLAYS[0], begun))
        await begun.wait()
        await engine.sleep(level=level, mode="keep")
        (first,) = core.process_ids
        os.kill(first, signal.SIGKILL)
        # Repeated by the engine where the core is lost meanwhile.
        assert (await engine.engine_state()).tags == ("weights", "kv_cache")
        assert core.process_ids != [first]
        (zeroed,) = await engine.collective_rpc(zeroed_weights)
        assert all(zeroed)
        assert not stream.done()
        await engine.wake_up()
        if level == 2:
            assert (await engine.engine_state()).name == "weights undefined"
            await engine.collective_rpc("reload_weights")
        assert said([await stream]) == expected[:1]

    with_engine(use, enable_multiprocessing=True)


@pytest.mark.slow
def test_a_core_that_is_killed_while_it_falls_asleep_or_wakes_does_so_again(expected: list[Any]) -> None:
    async def use(engine: AsyncEngine) -> None:
        core = engine._dispatcher.core
        assert isinstance(core, CoreGroup)
        for method in (engine.sleep, engine.wake_up, engine.sleep, engine.wake_up):
            (pid,) = core.process_ids
            doing = asyncio.ensure_future(method())
            await asyncio.sleep(0.002)
            os.kill(pid, signal.SIGKILL)
            await doing
            wait_until(lambda: not is_running(pid))  # noqa: B023 - it ends within the turn
            is_asleep = method == engine.sleep
            assert await engine.is_sleeping() is is_asleep
        assert said([await last_of(engine, prompt) for prompt in PLAYS]) == expected

    with_engine(use, enable_multiprocessing=True, max_restarts=9)


@pytest.mark.slow
def test_several_engines_sleep_and_wake_together(expected: list[Any]) -> None:
    with LLM("demo", data_parallel_size=2, **{**DEMO, "num_threads": 2}) as llm:
        assert said(llm.generate(PLAYS, GREEDY, use_tqdm=False)) == expected
        llm.sleep()
        assert all(all(one) for one in llm.collective_rpc(zeroed_weights))
        with pytest.raises(EngineAsleep):
            llm.generate(PLAYS[0], GREEDY, use_tqdm=False)
        llm.wake_up()
        assert said(llm.generate(PLAYS, GREEDY, use_tqdm=False)) == expected
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        assert said(llm.generate(PLAYS, GREEDY, use_tqdm=False)) == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint(folder, hidden_size=128, intermediate_size=256, vocab_size=VOCAB_SIZE)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_sleep_together_and_lost_ones_come_back_when_they_are_woken(folder: Path, ranks: dict[str, int]) -> None:
    core = make_core(folder, block_size=4, **ranks)
    try:
        expected = values(run(core, PROMPTS, PARAMS))
        for index, prompt in enumerate(PROMPTS):
            add(core, str(index), prompt, PARAMS)
        results: dict[str, Result] = {}
        core.step()
        put_to_sleep(core, 1, "keep", results=results)
        assert all(all(one) for one in core.collective_rpc(RpcCall(zeroed_weights)))
        call(core, "wake_up")
        finish(core, results)
        assert values([results[str(index)] for index in range(len(PROMPTS))]) == expected

        put_to_sleep(core, 1, "keep")
        kill_last_rank(core)
        add(core, "late", PROMPTS[0], PARAMS)
        for _ in range(3):
            core.step()
        # It wakes nothing.
        assert core.num_worker_restarts == 0
        assert state_of(core).tags == ("weights", "kv_cache")
        call(core, "wake_up", ["weights"])
        assert core.num_worker_restarts == 1
        assert state_of(core).tags == ("kv_cache",)
        call(core, "wake_up")
        late: dict[str, Result] = {}
        finish(core, late)
        assert values([late["late"]]) == expected[:1]

        kill_last_rank(core)
        put_to_sleep(core)
        assert all(all(one) for one in core.collective_rpc(RpcCall(zeroed_weights)))
        call(core, "wake_up")
        assert values(run(core, PROMPTS, PARAMS)) == expected
    finally:
        core.close()


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("method", ["reserve_sleep", "sleep", "wake_up"])
def test_a_rank_that_dies_within_its_own_sleep_or_wake_up_is_replaced(folder: Path, method: str, level: int) -> None:
    core = make_core(folder, block_size=4, tensor_parallel_size=2)
    try:
        expected = values(run(core, PROMPTS, PARAMS))
        for index, prompt in enumerate(PROMPTS):
            add(core, str(index), prompt, PARAMS)
        results: dict[str, Result] = {}
        core.step()
        core.collective_rpc(RpcCall(die_within, (method,)))
        put_to_sleep(core, level, "keep", results=results)
        assert state_of(core).tags == ("weights", "kv_cache")
        assert all(all(one) for one in core.collective_rpc(RpcCall(zeroed_weights)))
        call(core, "wake_up", ["kv_cache"])
        assert state_of(core).tags == ("weights",)
        call(core, "wake_up", ["weights"])
        assert core.num_worker_restarts == 1
        if level == 2:
            assert state_of(core).name == "weights undefined"
            call(core, "reload_weights")
        finish(core, results)
        assert values([results[str(index)] for index in range(len(PROMPTS))]) == expected
    finally:
        core.close()


def die_within(worker: Worker, method: str) -> None:
    """Let the last rank be killed by its next call of a method."""
    if worker.rank == worker.parallel.world_size - 1:
        worker.features.rpc_methods[method] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def kill_last_rank(core: EngineCore) -> None:
    pid = core._executor.process_ids[-1]  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: core._are_workers_lost, "the core knows of the loss")


def test_an_idle_engine_sleeps_by_itself_and_wakes_with_the_next_request(expected: list[Any]) -> None:
    async def use(engine: AsyncEngine) -> None:
        assert said([await last_of(engine, PLAYS[0])]) == expected[:1]
        for _ in range(2):
            while not await engine.is_sleeping():
                await asyncio.sleep(0.02)
            # Neither probes nor numbers wake it.
            await engine.get_metrics()
            await engine.check_health()
            state = await engine.engine_state()
            assert state.name == "sleeping (idle, level 1: weights, kv_cache)"
            assert said([await last_of(engine, PLAYS[0])]) == expected[:1]
        while not await engine.is_sleeping():
            await asyncio.sleep(0.02)
        # A call that needs the weights wakes it too.
        await engine.collective_rpc("reload_weights")
        assert said([await last_of(engine, PLAYS[1])]) == expected[1:2]
        while not await engine.is_sleeping():
            await asyncio.sleep(0.02)
        await engine.sleep(level=1)
        assert (await engine.engine_state()).name == "sleeping (level 1: weights, kv_cache)"
        await engine.wake_up()
        assert said([await last_of(engine, PLAYS[2])]) == expected[2:3]

    with_engine(use, enable_multiprocessing=False, sleep_idle_seconds=0.2)


def _is_idle(engine: AsyncEngine) -> bool:
    return engine._dispatcher.core.status().stats.state.name.startswith("sleeping (idle")


@pytest.mark.slow
def test_idle_cores_sleep_one_by_one(expected: list[Any]) -> None:
    async def use(engine: AsyncEngine) -> None:
        for _ in range(2):
            # The client takes in what its cores have sent when it is asked.
            while not (await engine.is_sleeping() and _is_idle(engine)):
                await asyncio.sleep(0.05)
            assert engine._dispatcher.core.status().why_not_ready is None
            assert said([await last_of(engine, prompt) for prompt in PLAYS]) == expected

    with_engine(use, data_parallel_size=2, sleep_idle_seconds=0.3, num_threads=2)
