"""Workers that end, hang or fail, at any time: requests go on with the same tokens, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import AsyncEngine, SamplingParams
from penstock.config import EngineConfig
from penstock.contract import RpcCall, SchedulerOutput
from penstock.engine.core import restarts, startup
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.processes.core_group import CoreGroup
from penstock.errors import ConfigError, EngineDead, ModelNotFound, WaitTimeout, WorkerError
from penstock.executor import MultiprocessExecutor
from penstock.executor.progress import ProgressWatch, cpu_time
from penstock.worker import WorkerBase
from penstock.worker.worker import Worker
from support.arrangements import PARAMS, PROMPTS, VOCAB_SIZE, assert_same, some_steps
from support.checkpoints import tiny_checkpoint
from support.engines import SMALL, Result, add, finish, greedy, make_core, run
from support.leftovers import descriptors, holders_of, nothing_left, shared_memory_of
from support.threads import num_threads
from support.waiting import PATIENCE_S, is_running, wait_until

pytestmark = pytest.mark.fresh_interpreters
TWO = {"tensor_parallel_size": 2, "num_threads": 2, "max_model_len": 128}
DEMO = {"tensor_parallel_size": 2, "num_threads": 2, "max_model_len": 128, "kv_cache_memory_bytes": "8MiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder, vocab_size=VOCAB_SIZE)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[Result]:
    core = make_core(folder, max_model_len=128)
    try:
        return run(core, PROMPTS, PARAMS)
    finally:
        core.close()


def process_ids(core: Any) -> list[int]:
    executor = core._executor
    assert isinstance(executor, MultiprocessExecutor)
    return executor.process_ids


def in_next_step(worker: WorkerBase, what: str) -> None:
    """Let something happen to the second rank in the middle of its next step."""

    def happen(batch: Any) -> Any:
        if what == "exit":
            os._exit(3)
        if what == "sleep":
            time.sleep(600)
        raise ZeroDivisionError("of all things")

    if worker.rank == 1:
        worker.runner.model_state.inputs = happen  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_where_another_owes_the_result(
    folder: Path, undisturbed: list[Result], caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core(folder, step_timeout_s=1.0, **TWO)
    (first, second), results = process_ids(core), some_steps(core)
    core.collective_rpc(RpcCall(in_next_step, ("sleep",)))
    finish(core, results)
    core.close()
    assert_same([results[f"r{index}"] for index in range(len(PROMPTS))], undisturbed)
    named = (
        rf"waits in step \d+ for rank 1 \(process {second}, sleeping\) \(beside rank 0 \(process {first}, sleeping\)\)"
    )
    assert any(re.search(named, record.getMessage()) for record in caplog.records)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_stopped_is_named(stage: int, folder: Path) -> None:
    """Whichever of them owes the result."""
    core = make_core(folder, pipeline_parallel_size=2, num_threads=2, step_timeout_s=1.0, max_restarts=0)
    pid = process_ids(core)[stage]
    try:
        some_steps(core)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineDead, match=rf"waits in step \d+ for rank {stage} \(process {pid}, stopped\)"):
            finish(core, {})
    finally:
        core.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("exit", r"Rank 1, process \d+, ended with exit code 3"),
        ("raise", "Rank 1 failed in execute_model: ZeroDivisionError"),
    ],
)
def test_what_ends_one_rank_in_a_step_leaves_nothing(
    what: str, named: str, folder: Path, undisturbed: list[Result], caplog: pytest.LogCaptureFixture
) -> None:
    with nothing_left() as left:
        core = make_core(folder, **TWO)
        results = some_steps(core)
        left.watch(process_ids(core))
        core.collective_rpc(RpcCall(in_next_step, (what,)))
        finish(core, results)
        left.watch(process_ids(core))
        core.close()
    assert_same([results[f"r{index}"] for index in range(len(PROMPTS))], undisturbed)
    assert any(re.match(named, record.getMessage()) for record in caplog.records)


@pytest.mark.slow
def test_descriptors_and_threads_are_as_many_after_five_restarts(folder: Path) -> None:
    with nothing_left() as left:
        core = make_core(folder, distributed_executor_backend="mp", max_model_len=128)
        for number in range(6):
            run(core, PROMPTS[:1], greedy(2))
            if number == 0:
                first = descriptors(), num_threads()
            assert num_threads(first[1]) <= first[1]
            assert descriptors() - first[0] == {}
            left.watch(process_ids(core))
            os.kill(process_ids(core)[0], signal.SIGKILL)
        core.close()


PARENT = """
import sys, time
from penstock.config import EngineConfig
from penstock.executor import create_executor

config = EngineConfig.create(sys.argv[1], tensor_parallel_size=2, device="cpu", num_threads=2)
executor = create_executor(config)
print(*executor.process_ids, flush=True)
time.sleep(600)
"""


def test_a_parent_that_is_killed_leaves_no_process_memory_or_file(folder: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PARENT, str(folder)]
    shared_before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        memory = set.union(*map(shared_memory_of, workers))
        assert len(workers) == 2
        assert set(holders_of(memory)) >= set(workers)
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(map(is_running, workers)) and not holders_of(memory), "workers end")
    assert not list(tmp_path.iterdir())
    if shared_before:
        assert not {path for path in set(Path("/dev/shm").iterdir()) - shared_before if "penstock" in path.name}


@pytest.mark.slow
def test_a_worker_that_dies_while_no_call_waits_is_replaced_before_the_next_step(
    folder: Path, undisturbed: list[Result], caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core(folder, distributed_executor_backend="mp", max_model_len=128)
    told: list[bool] = []
    core.on_loss(lambda: told.append(core.has_unfinished_requests()))
    assert not core.has_unfinished_requests()
    os.kill(process_ids(core)[0], signal.SIGKILL)
    wait_until(lambda: told, "the callback is called")
    assert told == [True]
    with pytest.raises(WorkerError, match=r"Rank 0, process \d+, was killed by signal 9 .* between calls"):
        core.check_health()
    assert core.step() == []
    core.check_health()
    assert not core.has_unfinished_requests()
    # A call finds fresh workers, too.
    os.kill(process_ids(core)[0], signal.SIGKILL)
    wait_until(core.has_unfinished_requests, "it is noticed")
    assert core.collective_rpc(RpcCall("check_health")) == [None]
    found = run(core, PROMPTS, PARAMS)
    core.close()
    assert_same(found, undisturbed)
    assert not any("The failed step" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_workers_that_have_stood_by_for_a_while_count_as_good(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(folder, distributed_executor_backend="mp", max_restarts=1, max_model_len=128)

    def kill() -> None:
        os.kill(process_ids(core)[0], signal.SIGKILL)
        wait_until(lambda: core._has_lost_workers, "it is noticed")

    monkeypatch.setattr(restarts, "GOOD_AFTER_S", 0.0)
    for _ in range(2):
        kill()
        assert core.step() == []
    # Though there is something to do by now.
    add(core, "r0", PROMPTS[0], greedy(2))
    kill()
    finish(core, {})
    monkeypatch.undo()
    kill()
    core.step()
    kill()
    with pytest.raises(EngineDead, match="Workers failed 2 times in a row"):
        core.step()


def pid_of(worker: WorkerBase) -> int:
    return os.getpid()


def pid_of_last(worker: WorkerBase) -> Any:
    """Process id on the last rank; a value that cannot be serialised on the others."""
    return os.getpid() if worker.rank == worker.parallel.world_size - 1 else (worker for _ in ())


@pytest.mark.slow
def test_an_idle_asynchronous_engine_replaces_workers_by_itself() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)

    async def last(engine: AsyncEngine) -> list[int]:
        async for output in engine.generate("ROMEO:", params):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    async def serve() -> None:
        async with AsyncEngine("demo", enable_multiprocessing=False, **DEMO) as engine:
            expected = await last(engine)
            before = await engine.collective_rpc(pid_of)
            assert await engine.collective_rpc(pid_of_last, unique_reply_rank=1) == before[1:]
            with pytest.raises(ConfigError, match=r"unique_reply_rank=2 is not valid. Allowed: 0 to 1, or None"):
                await engine.collective_rpc(pid_of, unique_reply_rank=2)
            os.kill(before[0], signal.SIGKILL)
            core = engine._dispatcher.core
            wait_until(lambda: not set(before) & set(process_ids(core)) and not core.has_unfinished_requests())
            await engine.check_health()
            assert await last(engine) == expected

    with nothing_left():
        asyncio.run(serve())


@pytest.mark.slow
def test_an_idle_core_in_a_process_of_its_own_replaces_workers_by_itself(folder: Path) -> None:
    config = EngineConfig.create(str(folder), **{**SMALL, "distributed_executor_backend": "mp", "max_model_len": 128})
    core = CoreGroup(config)
    try:
        (worker,) = core.collective_rpc(RpcCall(pid_of))
        os.kill(worker, signal.SIGKILL)
        process = psutil.Process(core.process_ids[0])
        wait_until(lambda: {child.pid for child in process.children()} - {worker}, "a new worker starts")
        (other,) = core.collective_rpc(RpcCall(pid_of))
        assert other != worker
        core.check_health()
    finally:
        core.close()


class BusyWorker(Worker):
    """Takes its time for the second step: seconds of computing, or for ever."""

    def execute_model(self, output: SchedulerOutput) -> None:
        if output.step_id == 2 and self.rank == 1 and os.environ.get("PENSTOCK_TEST_BUSY_S"):
            deadline = time.monotonic() + float(os.environ["PENSTOCK_TEST_BUSY_S"])
            while time.monotonic() < deadline:
                pass
        super().execute_model(output)


@pytest.mark.parametrize(("busy_s", "is_ended"), [(2.5, False), pytest.param(1000.0, True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_step_in_which_a_rank_computes_may_take_four_times_as_long(
    busy_s: float,
    is_ended: bool,
    folder: Path,
    undisturbed: list[Result],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_BUSY_S", str(busy_s))
    core = make_core(folder, worker_cls=f"{__name__}.BusyWorker", step_timeout_s=2.0, **TWO)
    before = process_ids(core)
    # Who replaces them does not dawdle.
    monkeypatch.delenv("PENSTOCK_TEST_BUSY_S")
    results: dict[str, Result] = {}
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        add(core, f"r{index}", prompt, params)
    finish(core, results)
    assert (process_ids(core) != before) == is_ended
    core.close()
    assert_same([results[f"r{index}"] for index in range(len(PROMPTS))], undisturbed)
    # Who waits for it in a group is a little less patient, and names it.
    named = "waited 6.4 s in gather_values", "for rank 1, which hangs or is gone"
    assert any(all(part in record.getMessage() for part in named) for record in caplog.records) == is_ended


def test_workers_of_an_executor_that_is_dropped_end(folder: Path) -> None:
    config = EngineConfig.create(str(folder), **{**SMALL, "distributed_executor_backend": "mp"})
    before, num_before = descriptors(), num_threads()
    executor = MultiprocessExecutor(config)
    (worker,) = executor.process_ids
    del executor
    gc.collect()
    wait_until(lambda: not is_running(worker), "the worker ends")
    assert num_threads(num_before) <= num_before
    wait_until(lambda: not descriptors() - before, "all descriptors are closed")


@pytest.fixture
def alone(folder: Path) -> Iterator[MultiprocessExecutor]:
    config = EngineConfig.create(str(folder), **{**SMALL, "distributed_executor_backend": "mp"})
    executor = MultiprocessExecutor(config)
    yield executor
    executor.shutdown()


@pytest.mark.parametrize(
    ("program", "limits", "found", "least_s"),
    [
        ("while True: pass", (1.0, 2.0), "compute for more than 2 s", 2.0),
        ("import time; time.sleep(600)", (1.0, 1000.0), "make no progress for 1 s", 1.0),
    ],
)
def test_a_process_that_computes_is_told_from_one_that_hangs(
    program: str, limits: tuple[float, float], found: str, least_s: float
) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", program]) as process:
        try:
            watch, begin = ProgressWatch(lambda: cpu_time([process.pid]), *limits), time.monotonic()
            while (what := watch.check()) is None:
                time.sleep(watch.interval_s)
            assert what == found
            assert least_s <= time.monotonic() - begin < least_s + PATIENCE_S
        finally:
            process.kill()


def test_a_stopped_worker_is_found_out_once_the_limit_is_over(alone: MultiprocessExecutor) -> None:
    os.kill(alone.process_ids[0], signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(
        WaitTimeout, match=r"step 1 for rank 0 \(process \d+, stopped\). Workers make no progress for 1 s"
    ):
        alone.output_of(1, 1.0)
    assert 0.9 < time.monotonic() - begin < PATIENCE_S


def failing_starts(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> list[int]:
    """From now on the first starts fail. Counts all of them."""
    starts: list[int] = []

    def create(config: EngineConfig) -> Any:
        starts.append(len(starts))
        if len(starts) <= num_failures:
            raise ModelNotFound("the disk is away")
        return MultiprocessExecutor(config)

    monkeypatch.setattr(startup, "create_executor", create)
    return starts


@pytest.mark.slow
def test_restarts_that_fail_are_tried_again(
    folder: Path, undisturbed: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(folder, distributed_executor_backend="mp", max_model_len=128)
    results = some_steps(core)
    starts = failing_starts(monkeypatch, 2)
    os.kill(process_ids(core)[0], signal.SIGKILL)
    finish(core, results)
    assert len(starts) == 3
    core.close()
    assert_same([results[f"r{index}"] for index in range(len(PROMPTS))], undisturbed)


def test_restarts_that_go_on_failing_end_the_engine_with_the_first_cause_and_the_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(folder, distributed_executor_backend="mp", max_restarts=2, max_model_len=128)
    some_steps(core)
    starts = failing_starts(monkeypatch, 100)
    os.kill(process_ids(core)[0], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(EngineDead, match=r"failed 3 times in a row; the first time: Rank 0, .* by signal 9") as caught:
        finish(core, {})
    assert "the last time: The workers could not be replaced: the disk is away" in str(caught.value)
    assert len(starts) == 2
    # After the second failure in a row there is a pause.
    assert time.monotonic() - begin > 0.2
    with pytest.raises(EngineDead, match="the disk is away"):
        core.step()
    core.close()


def contents_of_blocks(worker: WorkerBase) -> list[bytes]:
    cache = worker.runner.kv_cache  # type: ignore[attr-defined]
    pages = cache.memory_of_blocks(0, 1, cache.config.pools[0].num_blocks)
    return [page.contiguous().view(-1).numpy().tobytes() for page in pages]


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_dummy_batches_of_several_ranks_touch_nothing(
    arrangement: dict[str, int], folder: Path, undisturbed: list[Result]
) -> None:
    core = make_core(folder, num_threads=2, max_model_len=128, **arrangement)
    results = some_steps(core)
    for _ in range(3):
        before = core.collective_rpc(RpcCall(contents_of_blocks))
        core.collective_rpc(RpcCall("execute_dummy_batch"))
        assert core.collective_rpc(RpcCall(contents_of_blocks)) == before
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
    finish(core, results)
    core.close()
    assert_same([results[f"r{index}"] for index in range(len(PROMPTS))], undisturbed)


@pytest.mark.slow
def test_one_rank_may_answer_for_all(alone: MultiprocessExecutor, folder: Path) -> None:
    assert alone.collective_rpc(RpcCall(pid_of, unique_reply_rank=0)) == alone.process_ids
    for wrong in (1, -1, True, "0"):
        with pytest.raises(ConfigError, match=f"unique_reply_rank={wrong!r} is not valid. Allowed: 0, or None"):
            alone.collective_rpc(RpcCall(pid_of, unique_reply_rank=wrong))  # type: ignore[arg-type]
    core = make_core(folder)
    assert isinstance(core, EngineCore)
    assert core.collective_rpc(RpcCall(pid_of, unique_reply_rank=0)) == [os.getpid()]
    with pytest.raises(ConfigError, match="unique_reply_rank=1 is not valid. Allowed: 0, or None"):
        core.collective_rpc(RpcCall(pid_of, unique_reply_rank=1))
    core.close()
