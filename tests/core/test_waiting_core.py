"""A core whose requests all wait for something does nothing, and goes on at once when there is something to do.

The longest wait is that of a test that fails, so that nothing goes on because some time has passed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import pytest

from penstock.config import EngineConfig
from penstock.contract import GrammarOutput, SamplingParams, SchedulerOutput
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.core import engine_core as core_module
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.messages import EngineRequest
from penstock.engine.processes.core_group import CoreGroup
from penstock.engine.session import Session
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from support.checkpoints import tiny_checkpoint
from support.engines import SMALL, Result, add, greedy
from support.fake_engine import byte_level_tokenizer, write_tokenizer
from support.waiting import wait_until

FOREVER_S = 120.0
# For what takes a few milliseconds.
SOON_S = 60.0
PROMPT = [5, 6, 7]


class SlowGrammar:
    """Compiles the grammar of requests with the seed 1 until another thread says that it is done."""

    def __init__(self) -> None:
        self._wake: Callable[[], None] = lambda: None
        self.compiling: list[str] = []
        self._ready: list[str] = []
        self.num_asked = 0

    def on_ready(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def add(self, request: EngineRequest) -> bool:
        if request.sampling_params.seed != 1:
            return True
        self.compiling.append(request.req_id)
        return False

    def take_ready(self) -> Sequence[str]:
        self.num_asked += 1
        ready, self._ready = self._ready, []
        return ready

    def constrains(self, req_id: str) -> bool:
        return False

    def constrains_any(self, req_ids: Set[str]) -> bool:
        return False

    def accept(self, outputs: Sequence[EngineCoreOutput]) -> None: ...

    def bitmask(self, output: SchedulerOutput) -> GrammarOutput:
        return GrammarOutput(step_id=output.step_id)

    def close(self) -> None: ...

    def finish(self) -> None:
        """Complete the compilation, from another thread."""
        self._ready, self.compiling = self.compiling, []
        self._wake()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder)
    return write_tokenizer(folder, byte_level_tokenizer())


@pytest.fixture(params=[False, True], ids=["sync", "async scheduling"])
def config(folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> EngineConfig:
    monkeypatch.setattr(core_module, "_LONGEST_WAIT_S", FOREVER_S)
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


def test_a_grammar_that_another_thread_compiles_is_waited_for_without_asking(config: EngineConfig) -> None:
    grammar = SlowGrammar()
    core = EngineCore(config, grammar)
    add(core, "r0", PROMPT, slow())
    finished_at: list[float] = []

    def compile_it() -> None:
        time.sleep(0.3)
        finished_at.append(time.monotonic())
        grammar.finish()

    compiler = threading.Thread(target=compile_it, daemon=True)
    compiler.start()
    results = run_waiting(core)
    latency_s = time.monotonic() - finished_at[0]
    compiler.join()
    core.close()
    assert len(results["r0"].tokens) == 3
    assert latency_s < SOON_S
    # Twice before it is ready, since adding the request ends the first wait, and once or twice for each token.
    assert grammar.num_asked < 12


def test_what_becomes_ready_before_the_wait_is_not_waited_for(config: EngineConfig) -> None:
    grammar = SlowGrammar()
    core = EngineCore(config, grammar)
    add(core, "r0", PROMPT, slow())
    for _ in range(3):
        assert core.step() == []
    grammar.finish()
    began = time.monotonic()
    core.wait_for_work()
    assert time.monotonic() - began < SOON_S
    assert len(run_waiting(core)["r0"].tokens) == 3
    core.close()


def test_a_core_with_something_to_do_or_with_nothing_at_all_does_not_wait(config: EngineConfig) -> None:
    grammar = SlowGrammar()
    core = EngineCore(config, grammar)
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
    grammar = SlowGrammar()
    core = EngineCore(config, grammar)
    add(core, "r0", PROMPT, slow())
    core.step()
    core._woken.clear()
    began = time.monotonic()
    core.wait_for_work()
    assert 0.04 < time.monotonic() - began < SOON_S
    core.close()


def test_requests_and_aborts_of_other_threads_are_taken_while_an_async_engine_waits(config: EngineConfig) -> None:
    grammar = SlowGrammar()

    async def read(engine: AsyncEngine, params: SamplingParams) -> int:
        outputs = [output async for output in engine.generate({"prompt_token_ids": PROMPT}, params)]
        return len(outputs[-1].outputs[0].token_ids)

    async def serve() -> None:
        async with AsyncEngine.from_config(config, lambda config: EngineCore(config, grammar)) as engine:
            waiting = asyncio.create_task(read(engine, slow()))
            await asyncio.sleep(0.2)
            assert await asyncio.wait_for(read(engine, greedy(4)), SOON_S) == 4
            num_asked = -1
            for _ in range(50):
                if grammar.num_asked == num_asked:
                    break
                num_asked = grammar.num_asked
                await asyncio.sleep(0.2)
            assert grammar.num_asked == num_asked, "it never does nothing"
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(waiting, SOON_S)
            second = asyncio.create_task(read(engine, slow()))
            while len(grammar.compiling) < 2:
                await asyncio.sleep(0.01)
            # The first one was aborted, and only the second is ready now.
            grammar.finish()
            assert await asyncio.wait_for(second, SOON_S) == 3
            third = asyncio.create_task(read(engine, slow()))
            await asyncio.sleep(0.2)
            began = time.monotonic()
        assert time.monotonic() - began < SOON_S
        with pytest.raises(Exception, match="shut down"):
            await third

    asyncio.run(serve())


def test_another_thread_has_the_core_of_a_session_that_waits(config: EngineConfig) -> None:
    grammar = SlowGrammar()
    session = Session(config, load_core=lambda config: EngineCore(config, grammar))
    ended: set[str] = set()

    def drive() -> None:
        requests = [session.accept({"prompt_token_ids": PROMPT}, slow())]
        ended.update(progress.req_id for progress in session.run(requests) if progress.finished)

    waiting = threading.Thread(target=drive, daemon=True)
    waiting.start()
    wait_until(lambda: grammar.compiling, "the other thread adds its request")
    began = time.monotonic()
    requests = [session.accept({"prompt_token_ids": PROMPT}, greedy(4))]
    *_, progress = session.run(requests)
    assert len(progress.output().outputs[0].token_ids) == 4
    assert session.reset_prefix_cache()
    assert not ended
    grammar.finish()
    waiting.join(SOON_S)
    assert len(ended) == 1
    assert time.monotonic() - began < SOON_S
    session.close()


def load_waiting_core(config: EngineConfig) -> EngineCore:
    core_module._LONGEST_WAIT_S = FOREVER_S  # in the process that loads it
    return EngineCore(config, SlowGrammar())


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
