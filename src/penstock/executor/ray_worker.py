"""A rank in an actor of a Ray cluster. It has its environment and its rank before it imports torch."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config import env
from penstock.contract import decode, encode
from penstock.device.limits import cpu_quota
from penstock.device.threads import plan_threads
from penstock.errors import error_as_data
from penstock.executor.messages import (
    Answer,
    CloseWorker,
    FromWorker,
    StepDone,
    ToWorker,
    WorkerFailed,
    WorkerStart,
    WorkerStarted,
)
from penstock.executor.program import Program
from penstock.executor.worker_process import WorkerLoop, configure_worker_logging

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.parallel.connections import RankConnections
    from penstock.worker import WorkerWrapperBase


@dataclass(frozen=True, slots=True)
class RayStart:
    """start: `WorkerStart`, pickled. variables: of the environment. search_path: where the program that starts it finds
    modules, looked at last. store: by which the ranks find each other. place_on_machine: this rank among those of the
    node, and their number.
    """

    start: bytes
    variables: Mapping[str, str]
    search_path: Sequence[str]
    store: tuple[str, int]
    place_on_machine: tuple[int, int]


class RankActor:
    """What Ray makes an actor of. Its calls run one after another, in order, in one thread.

    `watch` and `look` run beside.
    """

    def __init__(self) -> None:
        self._ends = threading.Event()
        self._thread: int | None = None
        self._said: list[bytes] = []
        self._wrapper: WorkerWrapperBase | None = None
        self._connections: RankConnections | None = None
        self._loop: WorkerLoop | None = None

    def watch(self) -> None:
        """Does not return while the process lives, so that whoever waits for it is told of its end."""
        self._ends.wait()

    def look(self) -> tuple[float, bool]:
        """Processor time of the worker so far, in seconds, and whether it waits for other ranks.

        Of its thread alone, which has a part in all that is computed: Ray's own threads are never still for long.
        """
        waits = self._connections is not None and self._connections.is_waiting
        if self._thread is None or not hasattr(time, "pthread_getcpuclockid"):
            return time.process_time(), waits
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread)), waits

    def start(self, start: RayStart) -> list[bytes]:
        self._thread = threading.get_ident()
        try:
            self._start(start)
        except BaseException as error:
            self.put(WorkerFailed(error=error_as_data(error)))
        return self._take_said()

    def do(self, data: bytes) -> list[bytes]:
        """What a message of `ToWorker` says; messages of `FromWorker` that come of it."""
        assert self._loop is not None, "start comes first"
        message = decode(data, ToWorker).message
        assert not isinstance(message, CloseWorker), "that is a call of its own"
        self._loop.do(message)
        return self._take_said()

    def close(self) -> None:
        if self._wrapper is not None:
            self._wrapper.shutdown()
        if self._connections is not None:
            self._connections.close()

    def put(self, message: WorkerStarted | StepDone | Answer | WorkerFailed) -> None:
        self._said.append(encode(FromWorker(message)))

    def _take_said(self) -> list[bytes]:
        said, self._said = self._said, []
        return said

    def _start(self, told: RayStart) -> None:
        sys.path += [path for path in told.search_path if path not in sys.path]
        start: WorkerStart = pickle.loads(told.start)
        program = Program(start.main_path)
        config: EngineConfig = program.load(start.config)
        limits = config.parallel
        local_rank, num_local_ranks = told.place_on_machine
        threads = plan_threads(config.device.num_threads, quota=cpu_quota(), rank=local_rank, num_ranks=num_local_ranks)
        env.prepare_rank({**told.variables, "OMP_NUM_THREADS": str(threads.num_threads)})
        configure_worker_logging(start.rank)

        from penstock.device.select import gpu_of_rank
        from penstock.parallel.connections import RankConnections, address_towards, open_store
        from penstock.parallel.distributed_ranks import join_connected_ranks
        from penstock.parallel.local_ranks import SHARE_OF_STEP
        from penstock.worker import WorkerWrapperBase

        host, port = told.store
        self._connections = RankConnections(
            open_store(host, port, is_host=False),
            start.rank,
            limits.world_size,
            address=address_towards(host, port),
            timeout_s=SHARE_OF_STEP * limits.longest_step_s,
        )
        gpu = gpu_of_rank(config.device, local_rank, num_local_ranks)
        parallel = join_connected_ranks(self._connections, limits, gpu)
        self._wrapper = WorkerWrapperBase(rpc_rank=start.rank)
        self._wrapper.init_worker(config, replace(parallel, local_rank=local_rank, num_local_ranks=num_local_ranks))
        self._loop = WorkerLoop(
            self._wrapper,
            program,
            self,
            has_results=start.rank == limits.rank_with_results,
            step_timeout_s=limits.step_timeout_s,
        )
        num_speculative_tokens = self._wrapper.worker.num_speculative_tokens
        self.put(WorkerStarted(num_speculative_tokens=num_speculative_tokens, process_id=os.getpid()))
