"""Calls of a core that hangs raise WaitTimeout in time, with the waiting and the awaited side and the call."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from penstock.config import EngineConfig
from penstock.contract import SamplingParams
from penstock.engine import async_engine, session
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.core.core_thread import CoreThread
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.guards import LimitedLock
from penstock.engine.session import Session
from penstock.errors import PenstockError, WaitTimeout
from support.fake_engine import FakeCore, write_model
from support.waiting import PATIENCE_S, wait_until

LIMIT_S = 1.0
PARAMS = SamplingParams(max_tokens=3, seed=1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig.create(str(write_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def hanging() -> Iterator[FakeCore]:
    """Core whose second step hangs until the end of the test."""
    core = FakeCore()
    release = threading.Event()
    core.on_step = lambda step: step == 2 and release.wait(PATIENCE_S) and None  # type: ignore[assignment, func-returns-value]
    yield core
    release.set()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    def core_thread(**options: object) -> CoreThread:
        return CoreThread(**options, turn_timeout_s=LIMIT_S)  # type: ignore[arg-type]

    monkeypatch.setattr(async_engine, "CoreThread", core_thread)
    monkeypatch.setattr(session, "LimitedLock", lambda what: LimitedLock(what, LIMIT_S))


@pytest.mark.usefixtures("impatient")
def test_every_caller_of_an_async_engine_times_out_on_a_hanging_step(config: EngineConfig, hanging: FakeCore) -> None:
    async def read(engine: AsyncEngine) -> None:
        async for _ in engine.generate([9, 10], PARAMS):
            pass

    async def serve(engine: AsyncEngine) -> None:
        reader = asyncio.create_task(read(engine))
        while hanging.num_steps < 2:
            await asyncio.sleep(0.001)
        waits = [reader, engine.abort(["other"]), engine.reset_prefix_cache()]
        errors = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), PATIENCE_S)
        for error, call in zip(errors, ("generate", "abort", "reset_prefix_cache"), strict=True):
            assert isinstance(error, WaitTimeout)
            assert f"in {call} for the core's thread penstock-core" in str(error)
        with pytest.raises(WaitTimeout, match="in check_health for"):
            await engine.check_health()
        with pytest.raises(WaitTimeout, match="Thread MainThread waited 1 s in shutdown for the core's thread"):
            engine.shutdown()

    asyncio.run(serve(AsyncEngine.from_config(config, lambda config: hanging)))


@pytest.mark.usefixtures("impatient")
def test_long_generation_is_no_reason_to_give_up(config: EngineConfig) -> None:
    core = FakeCore()
    core.on_step = lambda step: time.sleep(0.1)

    async def serve() -> None:
        async with AsyncEngine.from_config(config, lambda config: core) as engine:
            outputs = [output async for output in engine.generate([9], SamplingParams(max_tokens=15, seed=1))]
            assert outputs[-1].outputs[0].finish_reason == "length"
            await engine.check_health()
            # A core without requests does nothing for long, and is asked nothing.
            await asyncio.sleep(1.5 * LIMIT_S)
            await engine.check_health()

    asyncio.run(serve())


def test_a_core_that_does_not_start_is_not_waited_for_forever() -> None:
    release = threading.Event()

    def start() -> Dispatcher:
        release.wait(PATIENCE_S)
        raise PenstockError("too late")

    with pytest.raises(WaitTimeout, match="waited 1 s in start for the core's thread penstock-core"):
        CoreThread(start, lambda end: None, start_timeout_s=LIMIT_S)
    release.set()


def test_an_error_of_starting_that_is_a_timeout_is_raised_as_it_is() -> None:
    def start() -> Dispatcher:
        raise WaitTimeout("the worker waited for the device")

    with pytest.raises(WaitTimeout, match="^the worker waited for the device$"):
        CoreThread(start, lambda end: None)


@pytest.mark.usefixtures("impatient")
def test_a_thread_times_out_on_the_step_of_another_one(config: EngineConfig, hanging: FakeCore) -> None:
    offline = Session(config, load_core=lambda config: hanging)
    requests = [offline.accept([9, 10], PARAMS)]
    driver = threading.Thread(target=lambda: list(offline.run(requests)), name="the-driver")
    driver.start()
    wait_until(lambda: hanging.num_steps == 2, "the second step begins")
    with pytest.raises(WaitTimeout, match="waited 1 s for thread the-driver to finish its step"):
        offline.reset_prefix_cache()
    hanging.on_step = lambda step: None
    driver.join(0.01)


def test_a_limited_lock_is_reentrant() -> None:
    lock = LimitedLock("do something", timeout_s=0.05)
    refusals: list[str] = []

    def take() -> None:
        try:
            with lock:
                refusals.append("taken")
        except WaitTimeout as error:
            refusals.append(str(error))

    with lock, lock:
        other = threading.Thread(target=take, name="the-other")
        other.start()
        other.join(PATIENCE_S)
    other = threading.Thread(target=take)
    other.start()
    other.join(PATIENCE_S)
    assert refusals == [
        "Thread the-other waited 0.05 s for thread MainThread to do something, which hangs or is overloaded.",
        "taken",
    ]


def test_a_wanted_lock_is_handed_over_at_its_next_release() -> None:
    """A thread that takes the lock again and again would otherwise keep it for as long as it keeps the interpreter."""
    lock, is_over = LimitedLock("do something", timeout_s=10), threading.Event()
    num_entries = num_while_wanted = 0

    def take_again_and_again() -> None:
        nonlocal num_entries, num_while_wanted
        while not is_over.is_set():
            with lock:
                num_entries += 1
                num_while_wanted += lock._is_wanted

    thread = threading.Thread(target=take_again_and_again)
    thread.start()
    wait_until(lambda: num_entries > 1000, "the thread takes the lock")
    lock.hold(10)
    is_over.set()
    lock._lock.release()
    thread.join(PATIENCE_S)
    assert num_while_wanted <= 5
