"""Session: requests run to their ends, and whatever breaks the caller's loop aborts the unfinished ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import EngineConfig
from penstock.contract import SamplingParams
from penstock.engine.inputs.input_processor import AcceptedRequest
from penstock.engine.session import Session
from penstock.errors import ContextTooLong, EngineDead, LifecycleError, TokenizerError
from support.fake_engine import FakeCore, scripted, write_model, write_tokenizer

PARAMS = SamplingParams(max_tokens=5)


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def session(tmp_path: Path, core: FakeCore) -> Iterator[Session]:
    config = EngineConfig.create(str(write_model(tmp_path / "model")))
    session = Session(config, load_core=lambda config: core)
    yield session
    session.close()


def accept(session: Session, count: int, params: SamplingParams = PARAMS) -> list[AcceptedRequest]:
    return [session.accept([9, 10 + number], params) for number in range(count)]


def run_all(session: Session, requests: list[AcceptedRequest]) -> dict[str, list[int]]:
    return {p.req_id: p.token_ids for p in session.run(requests) if p.finished}


def test_every_request_runs_to_its_end(session: Session) -> None:
    requests = accept(session, 3)
    results = run_all(session, requests)
    assert sorted(results) == sorted(accepted.request.req_id for accepted in requests)
    assert {len(tokens) for tokens in results.values()} == {5}


def test_progress_comes_with_every_token(session: Session, core: FakeCore) -> None:
    core.tokens = scripted(70, 71, 72)
    (request,) = accept(session, 1)
    lengths = [len(progress.token_ids) for progress in session.run([request])]
    assert lengths == [1, 2, 3, 4, 5]


def test_leaving_early_aborts_what_is_unfinished_and_nothing_else(session: Session, core: FakeCore) -> None:
    short, long = session.accept([9], SamplingParams(max_tokens=1)), session.accept([9], PARAMS)
    other = session.run(accept(session, 1))
    next(other)
    steps = session.run([short, long])
    assert next(steps).finished
    steps.close()
    assert core.aborted == [long.request.req_id]
    assert len(list(other)) == 4
    assert not core.running


def test_an_exception_in_the_callers_loop_aborts(session: Session, core: FakeCore) -> None:
    def consume() -> None:
        steps = session.run(accept(session, 2))
        for _ in steps:
            raise RuntimeError("the caller failed")

    with pytest.raises(RuntimeError, match="the caller failed"):
        consume()
    assert not core.running
    assert run_all(session, accept(session, 1))


def test_ctrl_c_arrives_between_steps_and_aborts(session: Session, core: FakeCore) -> None:
    step_finished = []

    def interrupt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            step_finished.append(step)

    core.on_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        run_all(session, accept(session, 3))
    assert step_finished == [2]
    assert not core.running
    assert len(core.aborted) == 3
    assert len(run_all(session, accept(session, 2))) == 2


def test_a_failing_step_aborts_and_its_error_is_the_one_raised(session: Session, core: FakeCore) -> None:
    def fail(step: int) -> None:
        raise EngineDead("the workers failed four times")

    core.on_step = fail
    with pytest.raises(EngineDead, match="four times"):
        run_all(session, accept(session, 2))
    assert len(core.aborted) == 2


def test_an_abort_that_fails_does_not_hide_the_first_error(
    session: Session, core: FakeCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> list[object]:
        raise ValueError("first" if args == (1,) else "second")

    core.on_step = fail  # type: ignore[assignment]
    monkeypatch.setattr(core, "abort_requests", fail)
    with pytest.raises(ValueError, match="first"):
        run_all(session, accept(session, 1))
    assert "Could not abort 1 requests" in caplog.text


def test_when_the_core_refuses_one_request_the_others_are_taken_back(session: Session, core: FakeCore) -> None:
    core.refuses = lambda request: request.prompt_token_ids[-1] == 12
    requests = [session.accept([9, 10 + number], PARAMS, where=f"prompts[{number}]") for number in range(4)]
    with pytest.raises(ContextTooLong, match=r"^prompts\[2\]: The cache is too small"):
        run_all(session, requests)
    assert {request.req_id for request in core.added} == set(core.aborted)
    assert not core.running
    # The refused id may be used again, so nothing of it was left behind.
    core.refuses = lambda request: False
    assert len(run_all(session, requests)) == 4


def test_a_core_that_loses_a_request_is_noticed(session: Session, core: FakeCore) -> None:
    core.on_step = lambda step: core.running.clear()
    with pytest.raises(EngineDead, match="has not ended"):
        run_all(session, accept(session, 1))


def test_nested_runs_drive_each_other(session: Session) -> None:
    outer = session.run(accept(session, 1))
    lengths = []
    for progress in outer:
        if not lengths:
            run_all(session, accept(session, 1))
        lengths.append(len(progress.token_ids))
    assert lengths[-1] == 5


def test_threads_share_an_engine(session: Session) -> None:
    batches = [accept(session, 5) for _ in range(6)]
    results: dict[int, dict[str, list[int]]] = {}

    def work(number: int) -> None:
        results[number] = run_all(session, batches[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for number, batch in enumerate(batches):
        assert sorted(results[number]) == sorted(accepted.request.req_id for accepted in batch)


def test_closing_twice_closes_once(session: Session, core: FakeCore) -> None:
    session.close()
    session.close()
    assert core.num_closes == 1


def test_refused_requests_are_reported_and_the_others_run(session: Session, core: FakeCore) -> None:
    core.refuses = lambda request: request.prompt_token_ids[-1] == 12
    requests = [session.accept([token], SamplingParams(max_tokens=2), f"number {token}") for token in (11, 12, 13)]
    refused = {}
    finished = [
        progress.req_id
        for progress in session.run(requests, lambda accepted, error: refused.update({accepted.where: str(error)}))
        if progress.finished
    ]
    assert refused == {"number 12": "number 12: The cache is too small for this one."}
    assert finished == [requests[0].request.req_id, requests[2].request.req_id]
    assert core.running == {}


def test_a_closed_session_refuses_everything(session: Session) -> None:
    requests = accept(session, 1)
    running = session.run(accept(session, 1))
    next(running)
    session.close()
    with pytest.raises(LifecycleError, match="closed"):
        session.accept([9], PARAMS)
    with pytest.raises(LifecycleError, match="closed"):
        run_all(session, requests)
    with pytest.raises(LifecycleError, match="closed"):
        list(running)


def test_a_damaged_tokenizer_is_found_before_the_core_loads(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    loaded = []

    def load_core(config: EngineConfig) -> FakeCore:
        loaded.append(config)
        return FakeCore()

    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Session(EngineConfig.create(str(folder)), load_core=load_core)
    assert loaded == []


def test_the_tokenizer_option_names_another_folder(tmp_path: Path) -> None:
    from support.fake_engine import byte_fallback_tokenizer

    model = write_model(tmp_path / "model")
    other = write_tokenizer(tmp_path / "other", byte_fallback_tokenizer())
    config = EngineConfig.create(str(model), tokenizer=str(other))
    assert Session(config, load_core=lambda config: FakeCore()).tokenizer.folder == other


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}, {"enable_multiprocessing": True}])
@pytest.mark.parametrize("kind", ["LLM", "AsyncEngine"])
@pytest.mark.each_value_quick
def test_no_engine_starts_while_the_program_ends(tmp_path: Path, kind: str, options: dict[str, object]) -> None:
    model = write_model(tmp_path / "model")
    program = (
        f"import atexit; from penstock import {kind}; atexit.register(lambda: {kind}({str(model)!r}, **{options!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "LifecycleError: No engine can start while the interpreter exits" in done.stderr


_PROGRAM = """
import sys, threading, time
from penstock.config import EngineConfig
from penstock.contract import SamplingParams
from penstock.engine.session import Session
from support.fake_engine import FakeCore

begun = threading.Event()

def step(number):
    begun.set()
    time.sleep(0.2)
    print("step", flush=True)

core = FakeCore()
core.on_step = step
session = Session(EngineConfig.create(sys.argv[1]), load_core=lambda config: core)
request = session.accept({"prompt_token_ids": [9, 10]}, SamplingParams(max_tokens=50))
threading.Thread(target=lambda: list(session.run([request])), daemon=True).start()
begun.wait()
"""


def test_the_end_of_the_program_comes_between_two_steps_of_a_daemon_thread(tmp_path: Path) -> None:
    """A torch operator that returns while the interpreter is finalised would abort the process (SIGABRT)."""
    command = [sys.executable, "-c", _PROGRAM, str(write_model(tmp_path / "model"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "step\n", "")
