"""Executor with one process per rank on this machine."""

from __future__ import annotations

import logging
import os
import pickle
import selectors
import subprocess
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

import psutil

from penstock.config import EngineConfig
from penstock.contract import RpcCall, decode, encode
from penstock.device.limits import cpu_quota
from penstock.device.threads import plan_threads
from penstock.executor.death_watch import DeathWatch, death_of
from penstock.executor.large_messages import Outgoing
from penstock.executor.messages import (
    CallWorker,
    CloseWorker,
    ExecuteStep,
    FromWorker,
    SampleStep,
    ToWorker,
    WorkerStart,
)
from penstock.executor.processes import ProcessStarter, limit_waits
from penstock.executor.progress import cpu_time
from penstock.executor.ranks import GRACE_S, Rank, RanksExecutor
from penstock.executor.serialization import dumps
from penstock.executor.worker_process import SOURCE
from penstock.parallel.local_ranks import ranks_behind, share_memory

logger = logging.getLogger(__name__)
# Timeout of a worker for finishing its own message, and for reading one while it has nothing else to do.
_MESSAGE_TIMEOUT_S = 60.0


@dataclass(slots=True, kw_only=True)
class _Rank(Rank):
    process: subprocess.Popen[bytes]
    connection: Connection


class MultiprocessExecutor(RanksExecutor):
    """Workers in processes of this machine. They do not run the user's script, so it needs no `__main__` guard.

    The end of any process ends the current call at once, and is noticed as soon between calls (`DeathWatch`).

    The processes end with this one, however it ends, and leave no process, file or shared memory behind.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._ranks: list[_Rank] = []
        self._stop_watch: Callable[[], object] = lambda: None
        self._has_dead_worker = False
        self._on_loss: Callable[[], None] = lambda: None
        self._close_memory: Callable[[], object] = lambda: None
        self._selector = selectors.DefaultSelector()
        self._starter = ProcessStarter()
        try:
            with self.startup_phase("processes"):
                self._start_processes()
                self._watch_for_deaths()
                self._wait_in_phase("start", self._not_started)
            logger.info("Workers: %d, in processes %s", len(self._ranks), ", ".join(map(str, self.process_ids)))
            with self.startup_phase("device"):
                self.collective_rpc(RpcCall("init_device"))
            with self.startup_phase("model"):
                self.collective_rpc(RpcCall("load_model"))
        except BaseException:
            self.shutdown()
            raise

    @property
    def _all_ranks(self) -> Sequence[Rank]:
        return self._ranks

    @property
    def has_lost_workers(self) -> bool:  # type: ignore[override]
        return self._has_dead_worker or self._failure is not None or self._is_closed

    def on_loss(self, callback: Callable[[], None]) -> None:
        self._on_loss = callback
        if self._has_dead_worker:
            callback()

    def check_health(self) -> None:
        self._check_usable()
        # Earlier messages, and mostly the end of the connections, are still to be read.
        ended = [rank for rank in self._ranks if rank.process.poll() is not None]
        while self._receive("", 0.0):
            pass
        if ended:
            self._died(ended[0], "")

    def shutdown(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_watch()
        if self._failure is None:
            # A worker that does not end by itself is killed below.
            self._close_workers()
        for rank in self._ranks:
            if rank.process.poll() is None:
                logger.debug("Rank %d, process %d, is killed", rank.rank, rank.process.pid)
                rank.process.kill()
            rank.process.wait()
            rank.connection.close()
        self._close_memory()
        self._selector.close()
        self._starter.close()

    @property
    def _reading_limit_s(self) -> float:
        """Timeout of a worker for reading a message, which it does when the step before is done."""
        return max(_MESSAGE_TIMEOUT_S, self._config.parallel.longest_step_s)

    def _start_processes(self) -> None:
        # Kept for `ranks_behind`.
        self._memory = memory = share_memory(self._config.parallel)
        self._close_memory = finalizer = weakref.finalize(self, os.close, memory)
        finalizer.atexit = False
        for rank in range(self._config.parallel.world_size):
            self._start_process(rank, memory)
        config = dumps("The configuration", self._config)
        for started in self._ranks:
            message = WorkerStart(config=config, rank=started.rank)
            with Outgoing(pickle.dumps(message)) as outgoing:
                self._send_to(started, outgoing, "start")

    def _start_process(self, rank: int, memory: int) -> None:
        ours, theirs = Pipe()
        limit_waits(ours, send_s=self._reading_limit_s, receive_s=_MESSAGE_TIMEOUT_S)
        place, num_places = self._config.parallel.place(rank)
        threads = plan_threads(self._config.device.num_threads, quota=cpu_quota(), rank=place, num_ranks=num_places)
        descriptors = [theirs.fileno(), memory]
        # The end of the process must be the end of the connection, so this process closes its copy.
        with theirs:
            process = self._starter.start(
                SOURCE, [os.getpid(), *descriptors], descriptors, {"OMP_NUM_THREADS": str(threads.num_threads)}
            )
        self._ranks.append(_Rank(rank=rank, process_id=process.pid, process=process, connection=ours))
        self._selector.register(ours, selectors.EVENT_READ, self._ranks[-1])

    def _close_workers(self) -> None:
        deadline = time.monotonic() + GRACE_S
        data = encode(ToWorker(CloseWorker()))
        for rank in self._ranks:
            try:
                rank.connection.send_bytes(data)
            except OSError:
                logger.debug("Rank %d had ended before it was closed", rank.rank)
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("Rank %d did not end within %g s", rank.rank, GRACE_S)

    def _send(self, message: ExecuteStep | SampleStep | CallWorker, name: str) -> None:
        with Outgoing(encode(ToWorker(message))) as outgoing:
            for rank in self._ranks:
                self._send_to(rank, outgoing, name)

    def _send_to(self, rank: _Rank, message: Outgoing, name: str) -> None:
        try:
            message.send(rank.connection)
        except BlockingIOError:
            # A part may have been sent, so that no message can follow.
            self._fail(self._timed_out(name, self._reading_limit_s, [rank], "to read a message"))
        except OSError:
            self._died(rank, name)

    def _used_s(self) -> float:
        return cpu_time(self.process_ids)

    def _behind(self) -> Sequence[Rank]:
        return [self._ranks[rank] for rank in ranks_behind(self._config.parallel, self._memory)]

    def _described(self, ranks: Sequence[Rank]) -> str:
        return ", ".join(f"rank {rank.rank} (process {rank.process_id}, {_state(rank)})" for rank in ranks)

    def _receive(self, name: str, timeout_s: float | None) -> bool:
        """Take in messages of workers; False if none came within the timeout."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            rank: _Rank = key.data
            try:
                data = rank.connection.recv_bytes()
            except BlockingIOError:
                self._fail(self._timed_out(name, _MESSAGE_TIMEOUT_S, [rank], "to finish a message"))
            except (EOFError, OSError):
                self._died(rank, name)
            self._take(rank, decode(data, FromWorker).message)
        return bool(ready)

    def _died(self, rank: _Rank, name: str) -> NoReturn:
        self._fail(self._located(death_of(rank.process, rank.rank, name), rank))

    def _watch_for_deaths(self) -> None:
        """Watch for the end of workers, without keeping a dropped executor alive."""
        me = weakref.ref(self)

        def note_death() -> None:
            executor = me()
            if executor is not None:
                executor._has_dead_worker = True
                executor._on_loss()

        watch = DeathWatch([rank.connection for rank in self._ranks], note_death)
        self._stop_watch = finalizer = weakref.finalize(self, watch.stop)
        finalizer.atexit = False


def _state(rank: Rank) -> str:
    """Process state of a rank, such as sleeping, running or stopped."""
    try:
        return str(psutil.Process(rank.process_id).status())
    except psutil.Error:
        return "gone"
