"""Workers in processes of their own: what they answer, how their end is noticed, and that nothing of them is left."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.config import EngineConfig
from penstock.contract import RpcCall
from penstock.errors import ConfigError, LifecycleError, ModelError, UnsupportedFeature, WaitTimeout, WorkerError
from penstock.executor import MultiprocessExecutor, create_executor
from penstock.executor import multiprocess as module
from penstock.worker import WorkerBase
from support.checkpoints import tiny_checkpoint
from support.threads import num_threads
from support.waiting import PATIENCE_S, is_running, wait_until

pytestmark = pytest.mark.fresh_interpreters
OPTIONS = {"device": "cpu", "num_threads": 2, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def rank_of(worker: WorkerBase) -> int:
    return worker.rank


def sum_of_ranks(worker: WorkerBase) -> list[int]:
    return worker.parallel.tensor.gather_values(worker.rank)


def start_of_rank(worker: WorkerBase) -> tuple[str, int, int, list[int]]:
    import torch

    cpus = sorted(os.sched_getaffinity(0))
    return os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), worker.parallel.world_size, cpus


def pid_of(worker: WorkerBase) -> int:
    return os.getpid()


def failing_on_last(worker: WorkerBase) -> int:
    if worker.rank == 1:
        raise ZeroDivisionError("of all things")
    return worker.rank


def failing(worker: WorkerBase) -> None:
    raise ModelError(f"rank {worker.rank} says no")


def waiting_on_last(worker: WorkerBase, until_there_is: Path) -> None:
    if worker.rank == 1:
        wait_until(until_there_is.exists)


def echo(worker: WorkerBase, data: bytes) -> bytes:
    return data


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder, vocab_size=96)
    return EngineConfig.create(str(folder), tensor_parallel_size=2, **OPTIONS)


@pytest.fixture(scope="module")
def shared(config: EngineConfig) -> Iterator[MultiprocessExecutor]:
    """For tests that leave the workers as they are."""
    executor = MultiprocessExecutor(config)
    yield executor
    executor.check_health()
    executor.shutdown()


@pytest.fixture
def start(config: EngineConfig) -> Iterator[Callable[[], MultiprocessExecutor]]:
    """Starts workers of which nothing may be left."""
    before = held()
    started: list[MultiprocessExecutor] = []

    def start_one() -> MultiprocessExecutor:
        started.append(MultiprocessExecutor(config))
        return started[-1]

    yield start_one
    for executor in started:
        executor.shutdown()
        executor.shutdown()
        assert not any(psutil.pid_exists(pid) for pid in executor.process_ids)
    assert_nothing_is_left(before)


def held() -> tuple[int, int, set[int]]:
    """Descriptors, threads and processes of this one."""
    return psutil.Process().num_fds(), num_threads(), children()


def assert_nothing_is_left(before: tuple[int, int, set[int]]) -> None:
    num_descriptors, most_threads, processes = before
    # Fewer than before are what an earlier test let go of late.
    assert num_threads(most_threads) <= most_threads
    assert psutil.Process().num_fds() <= num_descriptors
    assert children() <= processes


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_every_worker_answers_in_the_ranks_order(shared: MultiprocessExecutor) -> None:
    assert shared.collective_rpc(RpcCall(rank_of)) == [0, 1]
    assert shared.collective_rpc(RpcCall(sum_of_ranks)) == [[0, 1], [0, 1]]
    assert shared.collective_rpc(RpcCall(pid_of)) == shared.process_ids
    with pytest.raises(ConfigError, match="has no method 'dance'"):
        shared.collective_rpc(RpcCall("dance"))
    with pytest.raises(UnsupportedFeature, match="elastic expert parallelism"):
        shared.collective_rpc(RpcCall("elastic_ep_execute"))


def test_each_has_its_share_of_threads_before_torch_counts_them(shared: MultiprocessExecutor) -> None:
    ranks = shared.collective_rpc(RpcCall(start_of_rank))
    assert [(variable, num_threads, size) for variable, num_threads, size, _ in ranks] == [("1", 1, 2)] * 2
    if len(os.sched_getaffinity(0)) >= 2:
        assert not set(ranks[0][3]) & set(ranks[1][3])


def test_an_error_that_all_raise_keeps_its_type_and_harms_no_request(shared: MultiprocessExecutor) -> None:
    with pytest.raises(ModelError, match=r"^rank [01] says no$"):
        shared.collective_rpc(RpcCall(failing))
    shared.check_health()


def test_large_answers_and_calls_do_not_wait_for_each_other(shared: MultiprocessExecutor) -> None:
    data = bytes(range(256)) * 20_000
    assert shared.collective_rpc(RpcCall(echo, (data,))) == [data, data]
    assert shared.collective_rpc(RpcCall(rank_of)) == [0, 1]


def test_a_function_of_no_module_is_sent_by_value_and_one_with_a_lock_is_refused(shared: MultiprocessExecutor) -> None:
    factor, lock = 10, threading.Lock()
    assert shared.collective_rpc(RpcCall(lambda worker: worker.rank * factor)) == [0, 10]
    with pytest.raises(ConfigError, match=r"<lambda> cannot be sent to another process: cannot pickle '_thread.lock'"):
        shared.collective_rpc(RpcCall(lambda worker: lock))


@pytest.mark.slow
def test_workers_that_differ_after_a_call_must_be_replaced(start: Callable[[], MultiprocessExecutor]) -> None:
    executor = start()
    with pytest.raises(WorkerError, match="Rank 1 failed in failing_on_last: ZeroDivisionError: of all things"):
        executor.collective_rpc(RpcCall(failing_on_last))
    with pytest.raises(WorkerError, match=r"Rank 1 failed in failing_on_last, and 1 of 2 ranks did not"):
        executor.check_health()
    assert executor.why_not_restart() is None


@pytest.mark.slow
def test_a_worker_that_is_busy_reads_a_long_message_when_it_is_done(
    start: Callable[[], MultiprocessExecutor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MESSAGE_TIMEOUT_S", 1.0)
    executor, go_on = start(), tmp_path / "go on"
    with pytest.raises(WaitTimeout):
        executor.collective_rpc(RpcCall(waiting_on_last, (go_on,), timeout_s=0.1))
    threading.Timer(3.0, go_on.touch).start()
    assert executor.collective_rpc(RpcCall(echo, (bytes(8 << 20),))) == [bytes(8 << 20)] * 2


@pytest.mark.slow
def test_workers_must_be_replaced_after_ctrl_c_in_a_call(
    start: Callable[[], MultiprocessExecutor], tmp_path: Path
) -> None:
    """Workers that received the call run it nevertheless."""
    executor = start()
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        executor.collective_rpc(RpcCall(waiting_on_last, (tmp_path / "never",)))
    timer.join()
    assert executor.has_lost_workers
    with pytest.raises(WorkerError, match="KeyboardInterrupt came while workers were in waiting_on_last"):
        executor.collective_rpc(RpcCall("check_health"))


@pytest.mark.slow
def test_who_has_not_answered_is_named_and_its_late_answer_goes_nowhere(
    start: Callable[[], MultiprocessExecutor], tmp_path: Path
) -> None:
    executor, go_on = start(), tmp_path / "go on"
    executor.collective_rpc(RpcCall(rank_of))
    with pytest.raises(WaitTimeout, match=r"waited 3 s in waiting_on_last for rank 1 \(process \d+, \w+\)\.$"):
        executor.collective_rpc(RpcCall(waiting_on_last, (go_on,), timeout_s=3))
    go_on.touch()
    assert executor.collective_rpc(RpcCall(rank_of, timeout_s=60)) == [0, 1]


def test_a_killed_worker_ends_the_wait(start: Callable[[], MultiprocessExecutor]) -> None:
    executor = start()
    victim = executor.process_ids[1]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"Rank 1, process {victim}, was killed by signal 9 \(SIGKILL\)") as caught:
        executor.collective_rpc(RpcCall(sum_of_ranks))
    assert caught.value.rank == 1
    with pytest.raises(WorkerError, match="Rank 1"):
        executor.check_health()


def test_health_tells_of_a_death_that_no_request_waited_for(start: Callable[[], MultiprocessExecutor]) -> None:
    executor = start()
    executor.check_health()
    os.kill(executor.process_ids[0], signal.SIGKILL)
    # Its first thread has ended before its connections do.
    wait_until(lambda: executor.has_lost_workers, "its connection ends")
    with pytest.raises(WorkerError, match=r"Rank 0, process \d+, was killed"):
        executor.check_health()


def fork_in_c(worker: WorkerBase) -> int:
    """As a library may: of what Python does in forks, such as closing the worker's connection, nothing is done."""
    pid: int = ctypes.PyDLL(None).fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    return pid


def ends_of_processes(worker: WorkerBase) -> list[int]:
    """End a child process and a fork by signals; return how they ended."""
    program = subprocess.Popen(["sleep", "600"])
    program.terminate()
    heard, said = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.write(said, b"1")
        time.sleep(600)
        os._exit(0)
    os.read(heard, 1)
    os.kill(fork, signal.SIGTERM)
    return [program.wait(), -os.WTERMSIG(os.waitpid(fork, 0)[1])]


def test_a_worker_cannot_be_asked_to_end_and_what_it_starts_can(shared: MultiprocessExecutor) -> None:
    for pid in shared.process_ids:
        os.kill(pid, signal.SIGTERM)
    assert shared.collective_rpc(RpcCall(ends_of_processes)) == [[-signal.SIGTERM] * 2] * 2
    shared.check_health()


@pytest.mark.slow
def test_health_tells_of_a_death_though_another_process_keeps_the_connection(
    start: Callable[[], MultiprocessExecutor],
) -> None:
    executor = start()
    victim, forks = executor.process_ids[0], executor.collective_rpc(RpcCall(fork_in_c))
    try:
        os.kill(victim, signal.SIGKILL)
        os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)
        with pytest.raises(WorkerError, match=rf"Rank 0, process {victim}, was killed by signal 9"):
            executor.check_health()
        assert executor.has_lost_workers
    finally:
        for fork in forks:
            os.kill(fork, signal.SIGKILL)


@pytest.mark.slow
def test_a_stopped_worker_is_ended_too(
    start: Callable[[], MultiprocessExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.5)
    executor = start()
    executor.collective_rpc(RpcCall(rank_of))
    os.kill(executor.process_ids[1], signal.SIGSTOP)
    # A slow machine may need more than that for the other.
    with pytest.raises(WaitTimeout, match=r"in rank_of for .*rank 1 \(process \d+, stopped\)"):
        executor.collective_rpc(RpcCall(rank_of, timeout_s=1))
    executor.shutdown()


@pytest.mark.slow
def test_workers_outlive_the_thread_that_started_them_and_a_fork(config: EngineConfig) -> None:
    started: list[MultiprocessExecutor] = []
    thread = threading.Thread(target=lambda: started.append(MultiprocessExecutor(config)))
    thread.start()
    thread.join()
    (executor,) = started
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert executor.collective_rpc(RpcCall(sum_of_ranks)) == [[0, 1], [0, 1]]
    executor.shutdown()


def test_what_keeps_a_worker_from_starting_is_raised_and_nothing_is_left(config: EngineConfig, tmp_path: Path) -> None:
    before = held()
    tiny_checkpoint(tmp_path, intermediate_size=97)
    odd = EngineConfig.create(str(tmp_path), tensor_parallel_size=2, **OPTIONS)
    with pytest.raises(UnsupportedFeature, match=r"tensor_parallel_size=2 .*97 .*accept: 1\."):
        create_executor(odd)
    wrong = EngineConfig.create(str(tmp_path), distributed_executor_backend="mp", worker_cls="no.Such", **OPTIONS)
    with pytest.raises(ConfigError, match=r"worker_cls='no.Such' cannot be found"):
        create_executor(wrong)
    assert_nothing_is_left(before)


def test_a_worker_that_never_comes_up_is_named(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOURCE", "import time; time.sleep(600)")
    before = children()
    config = replace(config, parallel=replace(config.parallel, start_timeout_s=0.5))
    with pytest.raises(WaitTimeout, match=r"in start for rank 0 \(process \d+, \w+\), rank 1 \(process \d+, \w+\)"):
        MultiprocessExecutor(config)
    assert children() <= before


@pytest.mark.slow
def test_after_shutdown_calls_are_refused(start: Callable[[], MultiprocessExecutor]) -> None:
    executor = start()
    executor.shutdown()
    with pytest.raises(LifecycleError, match="shut down"):
        executor.collective_rpc(RpcCall(rank_of))


PARENT = """
import os, signal, sys, time
from penstock.config import EngineConfig
from penstock.contract import RpcCall
from penstock.executor import create_executor

def of_this_program(worker):
    return worker.rank + 10

config = EngineConfig.create(FOLDER, tensor_parallel_size=2, device="cpu", num_threads=2)
executor = create_executor(config)
print(*executor.process_ids, flush=True)
print(executor.collective_rpc(RpcCall(of_this_program)), flush=True)
if sys.argv[1] == "stopped":
    os.kill(executor.process_ids[1], signal.SIGSTOP)
if sys.argv[1] == "exit":
    sys.exit()
time.sleep(600)
"""


def start_program(config: EngineConfig, folder: Path, how: str) -> Any:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PARENT).replace("FOLDER", repr(str(config.model.folder))))
    return subprocess.Popen(
        [sys.executable, str(program), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("how", ["killed", "stopped", "exit"])
@pytest.mark.one_case_quick
def test_workers_end_with_their_parent(config: EngineConfig, tmp_path: Path, how: str) -> None:
    with start_program(config, tmp_path, how) as parent:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert parent.stdout.readline() == "[10, 11]\n"
        if how == "stopped":
            wait_until(lambda: psutil.Process(workers[1]).status() == psutil.STATUS_STOPPED)
        if how != "exit":
            parent.kill()
        parent.wait(PATIENCE_S)
        wait_until(lambda: not any(map(is_running, workers)), "they end")
