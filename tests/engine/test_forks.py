"""A forked process gets an error from its copy of an engine, and can create one of its own."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.beam_search import BeamSearchParams
from penstock.engine.session import Session
from penstock.errors import LifecycleError

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
# Two threads, so that the parent has a team of them.
SMALL: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 2,
    "kv_cache_memory_bytes": 8 << 20,
    "max_num_seqs": 4,
    "max_model_len": 256,
}
# Long enough to be computed by all threads.
PROMPT = "ROMEO: " * 30
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LIMIT_S = 60.0


def in_fork(action: Callable[[], Any]) -> Any:
    """Result or exception of `action` in a forked process, which must exit."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def act() -> None:
        try:
            sender.send(action())
        except Exception as error:
            sender.send(error)

    process = context.Process(target=act)
    process.start()
    sender.close()
    try:
        assert receiver.poll(LIMIT_S), "the forked process hangs"
        result = receiver.recv()
        process.join(LIMIT_S)
        assert process.exitcode == 0, "the forked process does not end well"
    finally:
        process.kill()
    return result


def tokens_of(llm: LLM) -> list[int]:
    return list(llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids)


def new_engine() -> list[int]:
    with LLM("demo", **SMALL) as llm:
        return tokens_of(llm)


def product() -> float:
    ones = torch.ones(512, 512)
    return float((ones @ ones).sum())


def assert_refused(found: Any) -> None:
    assert isinstance(found, LifecycleError), found
    assert f"was started in process {os.getpid()} and cannot be used in its forked child" in str(found)
    assert "'spawn'" in str(found)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **SMALL) as llm:
        yield llm


CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": tokens_of,
    "chat": lambda llm: llm.chat([{"role": "user", "content": "x"}], PARAMS, chat_template="{{ 1 }}"),
    "beam_search": lambda llm: llm.beam_search("x", BeamSearchParams(beam_width=2, max_tokens=2)),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "get_model_inspection": lambda llm: llm.get_model_inspection(),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_engine_of_the_parent_is_refused(name: str, llm: LLM) -> None:
    before = tokens_of(llm)
    assert_refused(in_fork(lambda: CALLS[name](llm)))
    assert tokens_of(llm) == before


def test_closing_it_in_a_fork_leaves_the_parents_alone(llm: LLM) -> None:
    before = tokens_of(llm)

    def close() -> None:
        with llm:
            pass
        llm.close()

    assert in_fork(close) is None
    assert tokens_of(llm) == before


@pytest.mark.parametrize("action", [new_engine, product])
def test_a_fork_of_a_process_that_computed_can_compute(action: Callable[[], Any], llm: LLM) -> None:
    tokens_of(llm)
    expected = action()
    assert in_fork(action) == expected
    assert in_fork(lambda: in_fork(action)) == expected
    assert action() == expected


def test_what_was_going_on_in_the_parent_is_let_go_in_a_fork() -> None:
    with closing(Session(EngineConfig.create("demo", **SMALL))) as session:
        steps = session.run([session.accept(PROMPT, PARAMS)])
        next(steps)

        def collect() -> None:
            steps.close()
            gc.collect()
            session.close()

        assert in_fork(collect) is None
        assert_refused(in_fork(lambda: next(session.run([session.accept(PROMPT, PARAMS)]))))
        *_, last = steps
        assert last.finished


def test_a_lock_that_is_held_in_the_parent_is_not_waited_for(llm: LLM) -> None:
    is_held, may_end = threading.Event(), threading.Event()

    def hold(_worker: Any) -> None:
        is_held.set()
        may_end.wait()

    thread = threading.Thread(target=lambda: llm.collective_rpc(hold))
    thread.start()
    is_held.wait()
    try:
        assert_refused(in_fork(lambda: tokens_of(llm)))
        assert in_fork(llm.close) is None
    finally:
        may_end.set()
        thread.join()


async def _last(engine: AsyncEngine) -> list[int]:
    outputs = [output async for output in engine.generate(PROMPT, PARAMS)]
    return list(outputs[-1].outputs[0].token_ids)


@pytest.mark.slow
def test_an_engine_with_a_thread_is_refused() -> None:
    engine = AsyncEngine("demo", **SMALL)
    before = asyncio.run(_last(engine))
    calls: list[Callable[[], Any]] = [
        lambda: asyncio.run(_last(engine)),
        lambda: asyncio.run(engine.abort("x")),
        lambda: asyncio.run(engine.reset_prefix_cache()),
        lambda: asyncio.run(engine.check_health()),
    ]
    for call in calls:
        assert_refused(in_fork(call))
    assert in_fork(lambda: engine.is_running) is False
    assert in_fork(engine.shutdown) is None
    assert in_fork(new_engine) == before
    assert asyncio.run(_last(engine)) == before
    engine.shutdown()


@pytest.mark.slow
def test_an_engine_with_a_process_is_refused_and_its_process_lives_on() -> None:
    with closing(Session(EngineConfig.create("demo", enable_multiprocessing=True, **SMALL))) as session:
        assert_refused(in_fork(lambda: next(session.run([session.accept(PROMPT, PARAMS)]))))
        assert_refused(in_fork(lambda: session._core.step()))
        assert in_fork(session.close) is None
        assert in_fork(session._core.close) is None
        *_, last = session.run([session.accept(PROMPT, PARAMS)])
        assert last.finished


@pytest.mark.slow
def test_the_end_of_a_fork_leaves_the_parents_engines_alone() -> None:
    """The child runs Python's full shutdown, which `multiprocessing` skips."""
    program = f"""
        import asyncio, os, sys
        from penstock import LLM, SamplingParams
        from penstock.config import EngineConfig
        from penstock.engine.async_engine import AsyncEngine
        from penstock.engine.session import Session

        if __name__ == "__main__":
            options = {SMALL!r}
            params = SamplingParams(temperature=0, max_tokens=3)
            llm = LLM("demo", **options)
            engine = AsyncEngine("demo", **options)
            session = Session(EngineConfig.create("demo", enable_multiprocessing=True, **options))
            llm.generate("x", params)
            child = os.fork()
            if child == 0:
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            print(llm.generate("x", params)[0].finished)

            async def last():
                async for output in engine.generate("x", params):
                    pass
                return output

            print(asyncio.run(last()).finished)
            *_, end = session.run([session.accept("x", params)])
            print(end.finished)
            session.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=2 * LIMIT_S
    )
    assert done.stdout.split() == ["True"] * 3, done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
