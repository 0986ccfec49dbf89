"""`AsyncEngine` over a fake core with scripted tokens."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Coroutine, Generator, Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar

import pytest

from penstock import RequestOutput, RequestOutputKind, SamplingParams
from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.errors import ContextTooLong, EngineDead, InvalidParameter, InvalidRequest, LifecycleError
from penstock.text.tokenizer import Tokenizer
from support.fake_engine import FakeCore, write_model
from support.waiting import until, wait_until

PARAMS = SamplingParams(max_tokens=8, seed=3)
PROMPT = list(range(9, 40))
T = TypeVar("T")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig.create(str(write_model(tmp_path_factory.mktemp("model"))), policy="priority")


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def engine(config: EngineConfig, core: FakeCore) -> Iterator[AsyncEngine]:
    engine = AsyncEngine.from_config(config, load_core=lambda config: core)
    yield engine
    engine.shutdown()


async def collect(
    engine: AsyncEngine, prompt: Any = PROMPT, params: Any = PARAMS, **options: Any
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **options)]


async def settle(engine: AsyncEngine) -> None:
    """Wait until the core's thread has run all earlier commands."""
    await engine.abort([])


def assert_nothing_is_left(engine: AsyncEngine, core: FakeCore) -> None:
    """Assert that neither the core nor the engine holds a request."""
    asyncio.run(settle(engine))
    assert not core.running
    req_ids = {req_id for request in core.added for req_id in (request.req_id, request.req_id.partition("#")[0])}
    gc.collect()
    assert not req_ids.intersection(texts_kept_by(engine))


def texts_kept_by(engine: AsyncEngine) -> Iterator[str]:
    """All strings reachable from an engine, except for its core."""
    found: dict[int, object] = {}
    left: list[object] = [engine]
    while left:
        thing = left.pop()
        if id(thing) in found or isinstance(thing, (FakeCore, ModuleType, type, BuiltinFunctionType)):
            continue
        found[id(thing)] = thing
        if isinstance(thing, str):
            yield thing
        # Whatever a function's module knows is behind it, too.
        left += thing.__closure__ or () if isinstance(thing, FunctionType) else gc.get_referents(thing)


class HeldCore(FakeCore):
    """Core whose steps wait for permission."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.on_step = lambda step: self.wait()

    def wait(self) -> None:
        assert self.permits.acquire(timeout=20)

    def allow(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.permits.release()


@pytest.fixture
def held(config: EngineConfig) -> Iterator[tuple[AsyncEngine, HeldCore]]:
    core = HeldCore()
    engine = AsyncEngine.from_config(config, load_core=lambda config: core)
    yield engine, core
    core.allow(1000)
    engine.shutdown()


def test_outputs_grow_until_the_last_is_finished(engine: AsyncEngine, core: FakeCore) -> None:
    outputs = asyncio.run(collect(engine, request_id="mine"))
    assert [output.finished for output in outputs] == [*[False] * (len(outputs) - 1), True]
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == 8
    assert {output.request_id for output in outputs} == {"mine"}
    assert_nothing_is_left(engine, core)


@pytest.mark.parametrize(
    "wanted",
    [
        {"output_kind": RequestOutputKind.DELTA},
        {"params": PARAMS.clone(output_kind=RequestOutputKind.DELTA)},
        {"params": PARAMS.clone(output_kind=RequestOutputKind.FINAL_ONLY), "output_kind": RequestOutputKind.DELTA},
    ],
    ids=["argument", "parameter", "argument before parameter"],
)
def test_deltas_add_up_to_the_whole(held: tuple[AsyncEngine, HeldCore], wanted: dict[str, Any]) -> None:
    engine, core = held

    async def both() -> tuple[list[RequestOutput], RequestOutput]:
        task = asyncio.create_task(collect(engine, **wanted))
        await until(lambda: core.num_steps == 1, "a step hangs")
        core.allow(2)
        await until(lambda: core.num_steps == 3, "a step hangs")
        await asyncio.sleep(0.01)
        core.allow(100)
        return await task, (await collect(engine))[-1]

    deltas, whole = asyncio.run(both())
    assert [id for delta in deltas for id in delta.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert "".join(delta.outputs[0].text for delta in deltas) == whole.outputs[0].text
    assert len(deltas) > 1


def test_only_the_final_output_comes_when_asked(held: tuple[AsyncEngine, HeldCore]) -> None:
    engine, core = held

    async def check() -> list[RequestOutput]:
        task = asyncio.create_task(collect(engine, output_kind=RequestOutputKind.FINAL_ONLY))
        for num_steps in range(1, 5):
            await until(lambda num_steps=num_steps: core.num_steps == num_steps, "a step hangs")
            await asyncio.sleep(0.01)
            core.allow(1)
        core.allow(1000)
        return await task

    (output,) = asyncio.run(check())
    assert output.finished
    assert len(output.outputs[0].token_ids) == 8


def test_many_callers_are_served_at_once(engine: AsyncEngine, core: FakeCore) -> None:
    core.on_step = lambda step: time.sleep(0.02)  # a step without any cost could end before the next caller comes

    async def all_of_them() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(engine, [9, 10 + number]) for number in range(20)))

    results = asyncio.run(all_of_them())
    assert all(result[-1].finished for result in results)
    assert core.num_steps < 20 * 8
    assert_nothing_is_left(engine, core)


def test_several_outputs_per_prompt_are_streamed_together(engine: AsyncEngine, core: FakeCore) -> None:
    params = SamplingParams(n=3, max_tokens=5, seed=1)
    (*_, last) = asyncio.run(collect(engine, params=params))
    assert [len(completion.token_ids) for completion in last.outputs] == [5, 5, 5]
    deltas = asyncio.run(collect(engine, params=params, output_kind=RequestOutputKind.DELTA))
    for index, completion in enumerate(last.outputs):
        assert [id for delta in deltas for id in delta.outputs[index].token_ids] == completion.token_ids
    assert_nothing_is_left(engine, core)


def test_the_event_loop_goes_on_during_a_step(held: tuple[AsyncEngine, HeldCore]) -> None:
    engine, core = held

    async def check() -> None:
        task = asyncio.create_task(collect(engine))
        await until(lambda: core.num_steps == 1, "the first step hangs")
        began = time.monotonic()
        for _ in range(20):
            await asyncio.sleep(0)
        late = asyncio.create_task(collect(engine, [9, 11]))
        await asyncio.sleep(0.01)
        assert time.monotonic() - began < 5
        assert not task.done()
        core.allow(1000)
        await asyncio.gather(task, late)

    asyncio.run(check())


def test_a_slow_reader_gets_what_it_missed_in_one_output(held: tuple[AsyncEngine, HeldCore]) -> None:
    engine, core = held

    async def read_after(stream: Any, num_steps: int) -> list[int]:
        hanging = core.num_steps + num_steps
        core.allow(num_steps)
        await until(lambda: core.num_steps == hanging, "the step after these hangs")
        output = await anext(stream)
        return list(output.outputs[0].token_ids)

    async def read_slowly() -> list[list[int]]:
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=20), output_kind=RequestOutputKind.DELTA)
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: core.num_steps == 1, "the first step hangs")
        core.allow(1)
        parts = [(await first).outputs[0].token_ids]
        await until(lambda: core.num_steps == 2, "the second step hangs")
        parts += [await read_after(stream, num_steps) for num_steps in (3, 1, 5)]
        await stream.aclose()
        return parts

    assert [len(part) for part in asyncio.run(read_slowly())] == [1, 3, 1, 5]


def test_a_reader_that_never_reads_keeps_no_outputs(held: tuple[AsyncEngine, HeldCore]) -> None:
    engine, core = held

    def count_outputs() -> int:
        gc.collect()
        return sum(type(thing) is RequestOutput for thing in gc.get_objects())

    async def ignore() -> int:
        num_before = count_outputs()  # other tests may have left some
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=30, seed=1))
        first = asyncio.ensure_future(anext(stream))
        core.allow(1)
        await first
        core.allow(1000)
        await until(lambda: not core.running, "the request has ended")
        await settle(engine)
        num_new = count_outputs() - num_before
        last = await anext(stream)
        assert last.finished
        assert len(last.outputs[0].token_ids) == 30
        return num_new

    assert asyncio.run(ignore()) <= 1


class ThrowAt(Awaitable[T]):
    """Coroutine that is cancelled at its `at`-th await."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], at: int) -> None:
        self.coroutine = coroutine
        self.at = at
        self.num_waits = 0

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self.coroutine.__await__()
        value: Any = None
        while True:
            try:
                awaited = steps.send(value)
            except StopIteration as stop:
                result: T = stop.value
                return result
            self.num_waits += 1
            if self.num_waits == self.at:
                try:
                    steps.throw(asyncio.CancelledError())
                except StopIteration as stop:
                    result = stop.value
                    return result
                raise AssertionError("a cancelled coroutine waited again")
            value = yield awaited


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(n=3, max_tokens=8)], ids=["one", "three outputs"])
def test_cancellation_at_every_await_leaves_nothing_behind(
    engine: AsyncEngine, core: FakeCore, params: SamplingParams
) -> None:
    core.on_step = lambda step: time.sleep(0.001)

    async def cancel(at: int) -> bool:
        attempt = ThrowAt(collect(engine, params=params), at)
        try:
            await attempt
        except asyncio.CancelledError:
            return False
        return attempt.num_waits < at

    at = 0
    while not asyncio.run(cancel(at := at + 1)):
        assert_nothing_is_left(engine, core)
        assert at < 100
    assert at > 2, "it never waited"
    assert_nothing_is_left(engine, core)
    assert asyncio.run(collect(engine))[-1].finished


@pytest.mark.parametrize("at", range(1, 8))
def test_closing_the_generator_after_any_output_ends_the_request(held: tuple[AsyncEngine, HeldCore], at: int) -> None:
    engine, core = held

    async def leave() -> None:
        core.allow(at)
        stream = engine.generate(PROMPT, PARAMS)
        num_tokens = 0
        while num_tokens < at:
            num_tokens = len((await anext(stream)).outputs[0].token_ids)
        await stream.aclose()
        core.allow(1000)

    asyncio.run(leave())
    assert_nothing_is_left(engine, core)


def test_a_loop_that_breaks_ends_the_request(engine: AsyncEngine, core: FakeCore) -> None:
    core.on_step = lambda step: time.sleep(0.002)

    async def leave() -> None:
        async for _ in engine.generate(PROMPT, SamplingParams(max_tokens=30)):
            break
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert_nothing_is_left(engine, core)


def test_a_cancelled_task_ends_its_request_and_no_other(engine: AsyncEngine, core: FakeCore) -> None:
    core.on_step = lambda step: time.sleep(0.002)

    async def cancel_one() -> RequestOutput:
        victim = asyncio.create_task(collect(engine, params=SamplingParams(max_tokens=30), request_id="victim"))
        other = asyncio.create_task(collect(engine))
        await until(lambda: core.running, "requests run")
        victim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await victim
        return (await other)[-1]

    assert asyncio.run(cancel_one()).finished
    assert_nothing_is_left(engine, core)
    assert core.aborted == ["victim"]


def test_an_event_loop_that_is_closed_leaves_no_request(held: tuple[AsyncEngine, HeldCore]) -> None:
    engine, core = held
    loop = asyncio.new_event_loop()
    stream = engine.generate(PROMPT, SamplingParams(max_tokens=30))
    task = loop.create_task(anext(stream))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    core.allow(1000)
    wait_until(lambda: not core.running, "it ends")
    asyncio.run(settle(engine))
    assert not core.running
    assert core.num_steps < 5
    del task


def test_abort_ends_a_stream_with_a_last_output(held: tuple[AsyncEngine, HeldCore]) -> None:
    engine, core = held

    async def check() -> list[RequestOutput]:
        task = asyncio.create_task(collect(engine, params=SamplingParams(max_tokens=30), request_id="mine"))
        await until(lambda: core.num_steps == 1, "the first step hangs")
        abort = asyncio.create_task(engine.abort(["mine", "unknown"]))
        await asyncio.sleep(0)
        core.allow(1000)
        await abort
        return await task

    outputs = asyncio.run(check())
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert_nothing_is_left(engine, core)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_abort_ends_samples_that_have_not_started_too(held: tuple[AsyncEngine, HeldCore], num_steps: int) -> None:
    engine, core = held

    async def check() -> RequestOutput:
        params = SamplingParams(n=3, max_tokens=20)
        task = asyncio.create_task(collect(engine, params=params, request_id="mine"))
        core.allow(num_steps)
        await until(lambda: core.num_steps == num_steps + 1, "a step hangs")
        abort = asyncio.create_task(engine.abort("mine"))
        await asyncio.sleep(0)
        core.allow(1)
        await abort
        return (await task)[-1]

    output = asyncio.run(check())
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 3
    assert_nothing_is_left(engine, core)


def test_abort_before_the_first_step_starts_no_sample(held: tuple[AsyncEngine, HeldCore]) -> None:
    engine, core = held

    async def check() -> RequestOutput:
        other = asyncio.create_task(collect(engine, [9, 11]))
        await until(lambda: core.num_steps == 1, "the first step hangs")
        task = asyncio.create_task(collect(engine, params=SamplingParams(n=3, max_tokens=20), request_id="mine"))
        await asyncio.sleep(0)
        abort = asyncio.create_task(engine.abort("mine"))
        await asyncio.sleep(0)
        core.allow(1000)
        await asyncio.gather(other, abort)
        return (await task)[-1]

    output = asyncio.run(check())
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 3
    assert [request.req_id for request in core.added[1:]] == ["mine#0"]
    assert_nothing_is_left(engine, core)


def test_a_stop_string_ends_the_request_in_the_core(engine: AsyncEngine, core: FakeCore) -> None:
    ids = engine.get_tokenizer().encode("the lazy dog", add_special_tokens=False)
    core.tokens = lambda request, position: ids[position % len(ids)]
    params = SamplingParams(max_tokens=30, stop="lazy")
    outputs = asyncio.run(collect(engine, params=params))
    assert outputs[-1].outputs[0].text == "the "
    assert outputs[-1].outputs[0].stop_reason == "lazy"
    assert all("l" not in output.outputs[0].text for output in outputs)
    assert_nothing_is_left(engine, core)
    assert core.aborted == [outputs[-1].request_id]


@pytest.mark.parametrize(
    ("prompt", "params", "options", "error", "message"),
    [
        ([], PARAMS, {}, InvalidRequest, "The prompt is empty"),
        ([9] * 64, PARAMS, {}, ContextTooLong, "The prompt has 64 tokens"),
        ([9], {"temperature": 0}, {}, InvalidParameter, "sampling_params is a dict"),
        ([9], PARAMS, {"priority": 0.5}, InvalidParameter, "priority=0.5"),
        ([9], PARAMS, {"request_id": ""}, InvalidParameter, "request_id=''"),
        ([9], PARAMS, {"request_id": 7}, InvalidParameter, "request_id=7"),
        ([9], PARAMS, {"output_kind": "delta"}, InvalidParameter, "output_kind='delta'.*CUMULATIVE"),
    ],
)
def test_a_bad_request_is_refused_and_others_are_served(
    engine: AsyncEngine,
    core: FakeCore,
    prompt: Any,
    params: Any,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        asyncio.run(collect(engine, prompt, params, **options))
    assert core.added == []
    assert asyncio.run(collect(engine))[-1].finished
    assert_nothing_is_left(engine, core)


def test_what_the_core_refuses_reaches_its_caller_alone(engine: AsyncEngine, core: FakeCore) -> None:
    core.refuses = lambda request: request.req_id == "large"

    async def both() -> list[Any]:
        calls = collect(engine, request_id="large"), collect(engine)
        return await asyncio.gather(*calls, return_exceptions=True)

    refused, fine = asyncio.run(both())
    assert isinstance(refused, ContextTooLong)
    assert fine[-1].finished
    assert_nothing_is_left(engine, core)


def test_a_second_request_of_the_same_name_is_refused_and_the_first_goes_on(
    held: tuple[AsyncEngine, HeldCore],
) -> None:
    engine, core = held

    async def both() -> tuple[list[RequestOutput], Any]:
        first = asyncio.create_task(collect(engine, request_id="mine"))
        second = asyncio.create_task(collect(engine, request_id="mine"))
        core.allow(1000)
        return await first, (await asyncio.gather(second, return_exceptions=True))[0]

    first, second = asyncio.run(both())
    assert len(first[-1].outputs[0].token_ids) == 8
    assert isinstance(second, InvalidRequest)
    assert "request_id='mine'" in str(second)
    assert_nothing_is_left(engine, core)


def test_leaving_after_the_end_does_not_end_the_next_request_of_that_name(
    held: tuple[AsyncEngine, HeldCore],
) -> None:
    engine, core = held

    async def reuse() -> RequestOutput:
        short = engine.generate(PROMPT, SamplingParams(max_tokens=2), "mine")
        first = asyncio.ensure_future(anext(short))
        core.allow(1)
        assert not (await first).finished
        core.allow(1)
        await until(lambda: core.num_steps == 2 and not core.running, "the first request has ended")
        await settle(engine)
        task = asyncio.create_task(collect(engine, request_id="mine"))
        await until(lambda: len(core.added) == 2, "the second request runs")
        await short.aclose()
        core.allow(1000)
        return (await task)[-1]

    assert asyncio.run(reuse()).outputs[0].finish_reason == "length"


def test_a_failed_request_has_its_error_and_others_continue(engine: AsyncEngine, core: FakeCore) -> None:
    core.failing = {7}

    async def both() -> list[list[RequestOutput]]:
        return await asyncio.gather(collect(engine, [7, 8]), collect(engine, [9]))

    failed, fine = asyncio.run(both())
    assert (failed[-1].error, failed[-1].outputs[0].finish_reason) == ("the logits are NaN", "error")
    assert (fine[-1].error, fine[-1].outputs[0].finish_reason) == (None, "length")


@pytest.mark.parametrize("cause", [EngineDead("the workers failed four times"), ZeroDivisionError("a defect")])
def test_a_dead_core_raises_in_every_caller(held: tuple[AsyncEngine, HeldCore], cause: Exception) -> None:
    engine, core = held

    def die(step: int) -> None:
        core.wait()
        if step == 3:
            raise cause

    core.on_step = die

    async def all_of_them() -> list[Any]:
        tasks = [asyncio.create_task(collect(engine, [9, 10 + number])) for number in range(4)]
        core.allow(1)
        await until(lambda: core.num_steps == 2, "a step hangs")
        tasks.append(asyncio.create_task(collect(engine, [9, 20], request_id="late")))
        await asyncio.sleep(0)
        core.allow(10)
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(all_of_them())
    assert len(results) == 5
    assert all(isinstance(result, EngineDead) and str(cause) in str(result) for result in results)
    assert len({id(result) for result in results}) == 5
    assert not engine.is_running
    with pytest.raises(EngineDead, match=str(cause)):
        asyncio.run(collect(engine))
    with pytest.raises(EngineDead, match=str(cause)):
        asyncio.run(engine.check_health())
    with pytest.raises(EngineDead, match=str(cause)):
        asyncio.run(engine.reset_prefix_cache())
    asyncio.run(engine.abort("anything"))
    engine.shutdown()
    assert core.num_closes == 1


def test_shutdown_raises_in_every_caller(held: tuple[AsyncEngine, HeldCore]) -> None:
    engine, core = held

    async def close_early() -> list[Any]:
        tasks = [asyncio.create_task(collect(engine, [9, 10 + number])) for number in range(3)]
        await until(lambda: core.num_steps == 1, "the first step hangs")
        tasks.append(asyncio.create_task(collect(engine, [9, 30])))
        await asyncio.sleep(0)
        core.allow(1)
        engine.shutdown()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(close_early())
    assert [type(result) for result in results] == [LifecycleError] * 4
    engine.shutdown()
    assert core.num_closes == 1
    with pytest.raises(LifecycleError, match="shut down"):
        asyncio.run(collect(engine))


def test_calls_after_the_end_raise_its_error(
    held: tuple[AsyncEngine, HeldCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, core = held

    async def ask_until_too_late() -> None:
        task = asyncio.create_task(collect(engine))
        await until(lambda: core.num_steps == 1, "the first step hangs")
        stop, is_told = engine._thread.stop, threading.Event()
        monkeypatch.setattr(engine._thread, "stop", lambda: (stop(), is_told.set()))
        end = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        asked = []
        while not is_told.is_set() or len(asked) < 50:
            asked.append(asyncio.create_task(engine.reset_prefix_cache()))
            await asyncio.sleep(0.004)
        asked.append(asyncio.create_task(engine.reset_prefix_cache()))
        await asyncio.sleep(0)
        core.allow(1)
        results = await asyncio.wait_for(asyncio.gather(task, *asked, end, return_exceptions=True), timeout=20)
        kinds = [type(result) for result in results[1:-1]]
        # Those that came before the shutdown are answered after the step; it ends the others, and what runs.
        assert kinds == [bool] * kinds.count(bool) + [LifecycleError] * kinds.count(LifecycleError)
        assert LifecycleError is type(results[0]) is kinds[-1]

    asyncio.run(ask_until_too_late())


def test_a_core_that_does_not_start_is_the_constructors_error(config: EngineConfig) -> None:
    def fail(config: EngineConfig) -> FakeCore:
        raise InvalidRequest("out of luck")

    num_threads = threading.active_count()
    with pytest.raises(InvalidRequest, match="out of luck"):
        AsyncEngine.from_config(config, load_core=fail)
    for _ in range(100):
        if threading.active_count() == num_threads:
            break
        time.sleep(0.01)
    assert threading.active_count() == num_threads


def test_leaving_the_block_gives_the_thread_back(config: EngineConfig) -> None:
    core = FakeCore()
    num_threads = threading.active_count()

    async def use() -> None:
        async with AsyncEngine.from_config(config, load_core=lambda config: core) as engine:
            await collect(engine)

    asyncio.run(use())
    assert core.num_closes == 1
    assert threading.active_count() == num_threads


def test_an_engine_that_is_dropped_ends_by_itself(config: EngineConfig) -> None:
    core = FakeCore()
    others = set(threading.enumerate())
    engine = AsyncEngine.from_config(config, load_core=lambda config: core)
    (thread,) = set(threading.enumerate()) - others
    asyncio.run(collect(engine))
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    thread.join(timeout=20)
    assert core.num_closes == 1


def test_two_engines_do_not_know_of_each_other(config: EngineConfig) -> None:
    cores = FakeCore(), FakeCore()

    async def both() -> None:
        first, second = (AsyncEngine.from_config(config, load_core=lambda config, core=core: core) for core in cores)
        results = await asyncio.gather(collect(first, request_id="same"), collect(second, request_id="same"))
        assert results[0][-1].outputs[0].token_ids == results[1][-1].outputs[0].token_ids
        first.shutdown()
        assert (await collect(second))[-1].finished
        second.shutdown()

    asyncio.run(both())
    assert [len(core.added) for core in cores] == [1, 2]


def test_several_event_loops_share_an_engine(engine: AsyncEngine, core: FakeCore) -> None:
    results: list[RequestOutput] = []

    def work() -> None:
        results.append(asyncio.run(collect(engine))[-1])

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(results) == 5
    assert all(result.finished for result in results)
    assert_nothing_is_left(engine, core)


def test_priorities_reach_the_core(engine: AsyncEngine, core: FakeCore) -> None:
    asyncio.run(collect(engine, priority=-5))
    assert [request.priority for request in core.added] == [-5]


def test_the_prefix_cache_is_reset_between_steps(engine: AsyncEngine, core: FakeCore) -> None:
    assert asyncio.run(engine.reset_prefix_cache())
    assert core.num_resets == 1


def test_the_engine_s_options_hold_for_its_requests(tmp_path: Path) -> None:
    config = EngineConfig.create(str(write_model(tmp_path)), max_logprobs=3)
    engine = AsyncEngine.from_config(config, load_core=lambda config: FakeCore())
    try:
        with pytest.raises(InvalidParameter, match="logprobs=4"):
            asyncio.run(collect(engine, params=SamplingParams(logprobs=4)))
    finally:
        engine.shutdown()


def test_long_prompts_are_tokenised_beside_the_event_loop(
    engine: AsyncEngine, core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.max_model_len = 100_000
    engine._input_processor._prompts.max_model_len = 100_000
    encode_up_to, threads = Tokenizer.encode_up_to, []

    def noted(tokenizer: Tokenizer, text: str, *arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return encode_up_to(tokenizer, text, *arguments)

    monkeypatch.setattr(Tokenizer, "encode_up_to", noted)
    for prompt in ("the fox", "the fox " * 2000):
        outputs = asyncio.run(collect(engine, prompt))
        assert outputs[-1].outputs[0].finish_reason == "length"
    assert [thread is threading.current_thread() for thread in threads] == [True, False]
    assert_nothing_is_left(engine, core)


def test_seeds_go_by_when_requests_come(config: EngineConfig) -> None:
    """Requests that are checked in intake threads reach the core later, but keep their place in the seeds' order."""

    async def texts() -> list[list[int]]:
        engine = AsyncEngine.from_config(config, load_core=lambda config: FakeCore())
        constrained = SamplingParams(max_tokens=8, structured_outputs={"regex": "a+"})
        plain = SamplingParams(max_tokens=8)
        outputs = await asyncio.gather(*(collect(engine, PROMPT, params) for params in (constrained, plain)))
        engine.shutdown()
        return [output[-1].outputs[0].token_ids for output in outputs]

    first, second = asyncio.run(texts())
    assert (first, second) == tuple(asyncio.run(texts()))
    assert first != second


def test_a_conversation_is_answered_like_a_prompt(engine: AsyncEngine, core: FakeCore) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    template = "{{ mood }}{{ messages[0].content }}{% if add_generation_prompt %}:{% endif %}"

    async def ask(**options: Any) -> list[RequestOutput]:
        stream = engine.chat(messages, PARAMS, chat_template=template, chat_template_kwargs={"mood": "<s>"}, **options)
        return [output async for output in stream]

    outputs = asyncio.run(ask(request_id="mine", output_kind=RequestOutputKind.DELTA))
    assert (outputs[0].prompt, outputs[0].request_id) == ("<s>the fox:", "mine")
    assert outputs[0].prompt_token_ids == engine._tokenizer.encode("<s>the fox:", add_special_tokens=False)
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 8
    (final,) = asyncio.run(ask(output_kind=RequestOutputKind.FINAL_ONLY, add_generation_prompt=False, priority=3))
    assert final.prompt == "<s>the fox"
    assert core.added[-1].priority == 3
    messages = []
    with pytest.raises(InvalidRequest, match="no messages"):
        asyncio.run(ask())


def test_a_conversation_may_be_left_while_it_is_rendered(engine: AsyncEngine, core: FakeCore) -> None:
    async def leave() -> None:
        stream = engine.chat([{"role": "user", "content": "x" * 100_000}], chat_template="{{ messages[0].content }}")
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert_nothing_is_left(engine, core)
