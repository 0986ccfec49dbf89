"""A core whose requests all wait for something does nothing, and goes on at once when there is something to do.

The longest wait is that of a test that fails, so that nothing goes on because some time has passed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from penstock.config import EngineConfig
from penstock.contract import SamplingParams
from penstock.contract.feature import Feature, register_feature
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.core import engine_core as core_module
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.messages import EngineRequest
from penstock.engine.processes.core_group import CoreGroup
from penstock.engine.session import Session
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.outputs import FinishReason
from penstock.scheduler.request import Request
from penstock.scheduler.services import SchedulerServices
from support.checkpoints import tiny_checkpoint
from support.engines import SMALL, Result, add, greedy
from support.fake_engine import byte_level_tokenizer, write_tokenizer
from support.features import scheduler_side, use_feature
from support.waiting import wait_until

FOREVER_S = 120.0
# For what takes a few milliseconds.
SOON_S = 60.0
PROMPT = [5, 6, 7]


class Slow(SchedulerFeature):
    """Lets requests with the seed 1 wait until another thread says that it is done.

    waiting: their ids. num_asked: turns of the core so far.
    """

    def __init__(self, services: SchedulerServices) -> None:
        self._services = services
        self.waiting: list[str] = []
        self.num_asked = 0

    def request_added(self, request: Request) -> None:
        if request.sampling_params.seed == 1:
            self.waiting.append(request.req_id)
            self._services.scheduler.wait_for(request.req_id, "another thread")

    def before_step(self) -> None:
        self.num_asked += 1

    def finish(self) -> None:
        """Let the requests run, from another thread."""
        self._services.call_soon(self._end_wait)

    def _end_wait(self) -> None:
        ready, self.waiting = self.waiting, []
        for req_id in ready:
            self._services.scheduler.ready(req_id, "another thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder)
    return write_tokenizer(folder, byte_level_tokenizer())


@pytest.fixture(params=[False, True], ids=["sync", "async scheduling"])
def config(folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> EngineConfig:
    monkeypatch.setattr(core_module, "_LONGEST_WAIT_S", FOREVER_S)
    use_feature(monkeypatch, name="slow", scheduler_side=Slow)
    return EngineConfig.create(str(folder), **SMALL, async_scheduling=request.param)


def slow(max_tokens: int = 3) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)


def run_waiting(core: EngineCore) -> dict[str, Result]:
    results: dict[str, Result] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
        core.wait_for_work()
    return results


def test_what_another_thread_prepares_is_waited_for_without_asking(config: EngineConfig) -> None:
    core = EngineCore(config)
    feature = scheduler_side(core, Slow)
    add(core, "r0", PROMPT, slow())
    finished_at: list[float] = []

    def compile_it() -> None:
        time.sleep(0.3)
        finished_at.append(time.monotonic())
        feature.finish()

    compiler = threading.Thread(target=compile_it, daemon=True)
    compiler.start()
    results = run_waiting(core)
    latency_s = time.monotonic() - finished_at[0]
    compiler.join()
    core.close()
    assert len(results["r0"].tokens) == 3
    assert latency_s < SOON_S
    # Twice before it is ready, since adding the request ends the first wait, and once or twice for each token.
    assert feature.num_asked < 12


def test_what_becomes_ready_before_the_wait_is_not_waited_for(config: EngineConfig) -> None:
    core = EngineCore(config)
    feature = scheduler_side(core, Slow)
    add(core, "r0", PROMPT, slow())
    for _ in range(3):
        assert core.step() == []
    feature.finish()
    began = time.monotonic()
    core.wait_for_work()
    assert time.monotonic() - began < SOON_S
    assert len(run_waiting(core)["r0"].tokens) == 3
    core.close()


def test_a_core_with_something_to_do_or_with_nothing_at_all_does_not_wait(config: EngineConfig) -> None:
    core = EngineCore(config)
    began = time.monotonic()
    core.wait_for_work()
    core.step()
    core.wait_for_work()
    add(core, "waits", PROMPT, slow())
    add(core, "runs", PROMPT, greedy(8))
    core._woken.clear()
    for _ in range(8):
        core.step()
        core.wait_for_work()
    core.abort_requests(["waits", "runs"])
    for _ in range(3):
        core.step()
        core.wait_for_work()
    assert time.monotonic() - began < SOON_S
    core.close()


def test_a_wait_is_bounded_whatever_is_forgotten(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "_LONGEST_WAIT_S", 0.05)
    core = EngineCore(config)
    add(core, "r0", PROMPT, slow())
    core.step()
    core._woken.clear()
    began = time.monotonic()
    core.wait_for_work()
    assert 0.04 < time.monotonic() - began < SOON_S
    core.close()


def test_requests_and_aborts_of_other_threads_are_taken_while_an_async_engine_waits(config: EngineConfig) -> None:
    features: list[Slow] = []

    def load(config: EngineConfig) -> EngineCore:
        core = EngineCore(config)
        features.append(scheduler_side(core, Slow))
        return core

    async def read(engine: AsyncEngine, params: SamplingParams) -> int:
        outputs = [output async for output in engine.generate({"prompt_token_ids": PROMPT}, params)]
        return len(outputs[-1].outputs[0].token_ids)

    async def serve() -> None:
        async with AsyncEngine.from_config(config, load) as engine:
            (feature,) = features
            waiting = asyncio.create_task(read(engine, slow()))
            await asyncio.sleep(0.2)
            assert await asyncio.wait_for(read(engine, greedy(4)), SOON_S) == 4
            num_asked = -1
            for _ in range(50):
                if feature.num_asked == num_asked:
                    break
                num_asked = feature.num_asked
                await asyncio.sleep(0.2)
            assert feature.num_asked == num_asked, "it never does nothing"
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(waiting, SOON_S)
            second = asyncio.create_task(read(engine, slow()))
            while len(feature.waiting) < 2:
                await asyncio.sleep(0.01)
            # The first one was aborted, and only the second is ready now.
            feature.finish()
            assert await asyncio.wait_for(second, SOON_S) == 3
            third = asyncio.create_task(read(engine, slow()))
            await asyncio.sleep(0.2)
            began = time.monotonic()
        assert time.monotonic() - began < SOON_S
        with pytest.raises(Exception, match="shut down"):
            await third

    asyncio.run(serve())


def test_another_thread_has_the_core_of_a_session_that_waits(config: EngineConfig) -> None:
    features: list[Slow] = []

    def load(config: EngineConfig) -> EngineCore:
        core = EngineCore(config)
        features.append(scheduler_side(core, Slow))
        return core

    session = Session(config, load_core=load)
    (feature,) = features
    ended: set[str] = set()

    def drive() -> None:
        requests = [session.accept({"prompt_token_ids": PROMPT}, slow())]
        ended.update(progress.req_id for progress in session.run(requests) if progress.finished)

    waiting = threading.Thread(target=drive, daemon=True)
    waiting.start()
    wait_until(lambda: feature.waiting, "the other thread adds its request")
    began = time.monotonic()
    requests = [session.accept({"prompt_token_ids": PROMPT}, greedy(4))]
    *_, progress = session.run(requests)
    assert len(progress.output().outputs[0].token_ids) == 4
    assert session.reset_prefix_cache()
    assert not ended
    feature.finish()
    waiting.join(SOON_S)
    assert len(ended) == 1
    assert time.monotonic() - began < SOON_S
    session.close()


def load_waiting_core(config: EngineConfig) -> EngineCore:
    core_module._LONGEST_WAIT_S = FOREVER_S  # in the process that loads it
    register_feature(Feature(name="slow", scheduler_side=Slow))
    return EngineCore(config)


@pytest.mark.slow
def test_a_core_elsewhere_hears_its_client_while_it_waits(folder: Path) -> None:
    core = CoreGroup(EngineConfig.create(str(folder), **SMALL), load_waiting_core)
    core.add_request(EngineRequest(req_id="waits", prompt_token_ids=PROMPT, sampling_params=slow()))
    time.sleep(0.3)
    began = time.monotonic()
    threading.Timer(0.2, core.wake).start()
    while time.monotonic() - began < 0.2:
        assert core.step() == []
    core.add_request(EngineRequest(req_id="runs", prompt_token_ids=PROMPT, sampling_params=greedy(4)))
    tokens: list[int] = []
    while len(tokens) < 4:
        for output in core.step():
            tokens += output.new_token_ids
    time.sleep(0.1)
    [end] = core.abort_requests(["waits"])
    assert end.finish_reason is FinishReason.ABORT
    assert time.monotonic() - began < SOON_S
    core.close()
