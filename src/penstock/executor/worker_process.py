"""Process of one rank's worker. Its environment and rank are set before it imports torch."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

from penstock.contract import RpcCall, SamplingInput, decode, encode
from penstock.errors import error_as_data
from penstock.executor.large_messages import receive_message
from penstock.executor.messages import (
    Answer,
    CallWorker,
    CloseWorker,
    ExecuteStep,
    FromWorker,
    SampleStep,
    StepDone,
    ToWorker,
    WorkerFailed,
    WorkerStart,
    WorkerStarted,
    unpack_step,
)
from penstock.executor.processes import end_with_parent, keep_to_this_process, leave_end_to_parent
from penstock.executor.serialization import dumps, loads
from penstock.observability.logging import LOGGER_NAME, configure_logging, log_uncaught_errors
from penstock.system import env

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.worker import WorkerWrapperBase

SOURCE = "from penstock.executor.worker_process import main; main()"
# Bytes that a connection buffers without a reader, on every system.
_SMALL_BYTES = 4096


def main() -> None:
    """Run a worker. Arguments: parent process id, and descriptors of the connection to it and of the shared memory."""
    parent, connection_descriptor, memory_descriptor = map(int, sys.argv[1:])
    end_with_parent(parent)
    leave_end_to_parent()
    connection = Connection(connection_descriptor)
    keep_to_this_process(connection, memory_descriptor)
    outbox = _Outbox(connection)
    try:
        start: WorkerStart = pickle.loads(receive_message(connection))
        configure_worker_logging(start.rank)
        _run(start, memory_descriptor, connection, outbox)
    except (EOFError, ConnectionError):
        return
    except BaseException as error:
        outbox.put(WorkerFailed(error=error_as_data(error)))
        outbox.close()
        raise SystemExit(1) from error
    outbox.close()


class _Outbox:
    """Sends messages in order and never blocks: the executor may be sending, too."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # A thread, started on demand, sends messages that would block.
        self._waiting: queue.Queue[bytearray] = queue.Queue()
        self._thread: threading.Thread | None = None

    def put(self, message: WorkerStarted | StepDone | Answer | WorkerFailed) -> None:
        data = encode(FromWorker(message))
        if len(data) <= _SMALL_BYTES and self._waiting.unfinished_tasks == 0:
            self._connection.send_bytes(data)
            return
        self._waiting.put(data)
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_waiting, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait until all messages are sent."""
        self._waiting.join()

    def _send_waiting(self) -> None:
        while True:
            data = self._waiting.get()
            # The end of the executor is noticed by reading.
            with contextlib.suppress(OSError):
                self._connection.send_bytes(data)
            self._waiting.task_done()


class Outbox(Protocol):
    """Sink of a worker's messages."""

    def put(self, message: WorkerStarted | StepDone | Answer | WorkerFailed) -> None: ...


class WorkerLoop:
    """Handles the executor's messages, in order."""

    def __init__(
        self,
        wrapper: WorkerWrapperBase,
        outbox: Outbox,
        *,
        has_results: bool,
        step_timeout_s: float,
    ) -> None:
        self._wrapper = wrapper
        self._outbox = outbox
        self._has_results = has_results
        self._step_timeout_s = step_timeout_s

    def run(self, connection: Connection) -> None:
        while not isinstance(message := decode(receive_message(connection), ToWorker).message, CloseWorker):
            self.handle(message)

    def handle(self, message: ExecuteStep | SampleStep | CallWorker) -> None:
        """Handle one message; its results go to the outbox."""
        if isinstance(message, CallWorker):
            self._call(message)
        else:
            self._step(message)

    def _step(self, message: ExecuteStep | SampleStep) -> None:
        try:
            if isinstance(message, ExecuteStep):
                self._wrapper.execute_method("execute_model", unpack_step(message.output))
                if message.output.awaiting_req_ids:
                    return
                sampling = SamplingInput(step_id=message.output.step_id)
            else:
                sampling = message.sampling
            handle = self._wrapper.execute_method("sample_tokens", sampling)
            if self._has_results:
                output = self._reporting("get_output", lambda: handle.get_output(self._step_timeout_s))
                self._outbox.put(StepDone(output=output))
        except Exception as error:
            self._outbox.put(WorkerFailed(error=error_as_data(error)))

    def _call(self, message: CallWorker) -> None:
        try:
            call: RpcCall = self._reporting("a call that was sent", lambda: loads(message.call))
            result = self._wrapper.execute_method(call.method, *call.args, **call.kwargs)
            answer = Answer(call_id=message.call_id)
            if call.unique_reply_rank in (None, self._wrapper.rpc_rank):
                data = self._reporting("its result", lambda: dumps("The result", result))
                answer = Answer(call_id=message.call_id, result=data)
        except BaseException as error:
            answer = Answer(call_id=message.call_id, error=error_as_data(error))
        self._outbox.put(answer)

    def _reporting(self, name: str, run: Callable[[], Any]) -> Any:
        """Run a function; its exception becomes an error that names the rank."""
        try:
            return run()
        except Exception as error:
            self._wrapper.report(name, error)


def _run(start: WorkerStart, memory_descriptor: int, connection: Connection, outbox: _Outbox) -> None:
    env.prepare_rank({})
    from penstock.parallel.local_ranks import join_local_ranks
    from penstock.worker import WorkerWrapperBase

    wrapper = WorkerWrapperBase(rpc_rank=start.rank)
    config: EngineConfig = loads(start.config)
    wrapper.init_worker(config, join_local_ranks(start.rank, config.parallel, memory_descriptor))
    try:
        outbox.put(WorkerStarted(num_speculative_tokens=wrapper.worker.num_speculative_tokens, process_id=os.getpid()))
        limits = config.parallel
        loop = WorkerLoop(
            wrapper,
            outbox,
            has_results=start.rank == limits.rank_with_results,
            step_timeout_s=limits.step_timeout_s,
        )
        loop.run(connection)
    finally:
        wrapper.shutdown()


def configure_worker_logging(rank: int) -> None:
    """Log info lines on rank 0 only; other ranks log warnings and errors."""
    configure_logging()
    log_uncaught_errors()
    logger = logging.getLogger(LOGGER_NAME)
    if rank != 0 and logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)
