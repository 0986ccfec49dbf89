"""Ray actor of a rank. Its environment and rank are set before it imports torch."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
from penstock.executor.serialization import loads
from penstock.executor.worker_process import WorkerLoop, configure_worker_logging
from penstock.system import env

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.parallel.connections import RankConnections
    from penstock.worker import WorkerWrapperBase


@dataclass(frozen=True, slots=True)
class RayStart:
    """Start message of an actor.

    start: `WorkerStart`, pickled. variables: environment variables. search_path: the driver's `sys.path`, searched
    last. store: host and port of the ranks' store. place_on_machine: the rank's number among those of the node, and
    their number.
    """

    start: bytes
    variables: Mapping[str, str]
    search_path: Sequence[str]
    store: tuple[str, int]
    place_on_machine: tuple[int, int]


class RankActor:
    """Actor class of a rank. Calls run one after another, in order, in one thread; `watch`, `heartbeat` beside."""

    def __init__(self) -> None:
        self._ends = threading.Event()
        self._thread: int | None = None
        self._outgoing: list[bytearray] = []
        self._wrapper: WorkerWrapperBase | None = None
        self._connections: RankConnections | None = None
        self._loop: WorkerLoop | None = None

    def watch(self) -> None:
        """Block while the process lives, so that Ray reports the end of the call with the end of the process."""
        self._ends.wait()

    def heartbeat(self) -> tuple[float, bool]:
        """Return the CPU time of the worker so far, in seconds, and whether it waits for other ranks.

        Only the worker's own thread counts, which takes part in all computation: Ray's threads are never idle for long.
        """
        waits = self._connections is not None and self._connections.is_waiting
        if self._thread is None or not hasattr(time, "pthread_getcpuclockid"):
            return time.process_time(), waits
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread)), waits

    def start(self, start: RayStart) -> list[bytearray]:
        self._thread = threading.get_ident()
        try:
            self._start(start)
        except BaseException as error:
            self.put(WorkerFailed(error=error_as_data(error)))
        return self._take_outgoing()

    def do(self, data: bytes) -> list[bytearray]:
        """Handle a `ToWorker` message; return the resulting `FromWorker` messages."""
        assert self._loop is not None, "start comes first"
        message = decode(data, ToWorker).message
        assert not isinstance(message, CloseWorker), "that is a call of its own"
        self._loop.handle(message)
        return self._take_outgoing()

    def close(self) -> None:
        if self._wrapper is not None:
            self._wrapper.shutdown()
        if self._connections is not None:
            self._connections.close()

    def put(self, message: WorkerStarted | StepDone | Answer | WorkerFailed) -> None:
        self._outgoing.append(encode(FromWorker(message)))

    def _take_outgoing(self) -> list[bytearray]:
        messages, self._outgoing = self._outgoing, []
        return messages

    def _start(self, message: RayStart) -> None:
        sys.path += [path for path in message.search_path if path not in sys.path]
        start: WorkerStart = pickle.loads(message.start)
        config: EngineConfig = loads(start.config)
        limits = config.parallel
        local_rank, num_local_ranks = message.place_on_machine
        threads = plan_threads(config.device.num_threads, quota=cpu_quota(), rank=local_rank, num_ranks=num_local_ranks)
        env.prepare_rank({**message.variables, "OMP_NUM_THREADS": str(threads.num_threads)})
        configure_worker_logging(start.rank)

        from penstock.device.select import gpu_of_rank
        from penstock.parallel.connections import RankConnections, address_towards, open_store
        from penstock.parallel.distributed_ranks import join_connected_ranks
        from penstock.parallel.local_ranks import SHARE_OF_STEP
        from penstock.worker import WorkerWrapperBase

        host, port = message.store
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
            self,
            has_results=start.rank == limits.rank_with_results,
            step_timeout_s=limits.step_timeout_s,
        )
        num_speculative_tokens = self._wrapper.worker.num_speculative_tokens
        self.put(WorkerStarted(num_speculative_tokens=num_speculative_tokens, process_id=os.getpid()))
