"""A core in a process of its own, which can die without taking its client along."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from penstock.config import EngineConfig
from penstock.contract import decode, encode
from penstock.engine.core_client import CALL_TIMEOUT_S, START_TIMEOUT_S, CoreClient
from penstock.engine.core_server import read_all, run_core
from penstock.engine.dispatcher import start_core
from penstock.engine.messages import (
    AbortRequests,
    AddRequest,
    Answer,
    CloseCore,
    CoreEnded,
    CoreStarted,
    EngineRequest,
    FromCore,
    StepOutputs,
    ToCore,
    UtilityCall,
)
from penstock.engine.owning_process import OwningProcess
from penstock.errors import (
    EngineDead,
    LifecycleError,
    PenstockError,
    WaitTimeout,
    error_from_data,
    same_error,
)
from penstock.executor.processes import describe_end, limit_waits
from penstock.scheduler.outputs import EngineCoreOutput

logger = logging.getLogger(__name__)
# How long a process that was told to end, or whose connection broke, is given to do so.
_END_TIMEOUT_S = 30.0
_EXIT_CODE_TIMEOUT_S = 0.5
_NO_OUTPUTS = encode(FromCore(StepOutputs(outputs=[])))


class CoreProcess:
    """The client (`CoreClient`) of a core that it starts in another process.

    load_core: makes the core there; it is pickled by its name. start_timeout_s, call_timeout_s: how long the core is
    waited for when it starts, and whenever it owes an answer or a step. pid: of the process.

    A process that dies is noticed at once, by its connection: whoever waits for it gets EngineDead with the cause.

    Raises what `load_core` raises; EngineDead when the process dies, WaitTimeout when it says nothing for too long.
    """

    def __init__(
        self,
        config: EngineConfig,
        load_core: Callable[[EngineConfig], CoreClient] = start_core,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._owner = OwningProcess()
        self._call_timeout_s = call_timeout_s
        self._ended_by: PenstockError | None = None
        self._unfinished: set[str] = set()
        self._num_calls = 0
        # Of steps that were made while something else was waited for.
        self._outputs: deque[list[EngineCoreOutput]] = deque()
        self._process, self._connection = _start_process(config, load_core, call_timeout_s)
        _clients.add(self)
        self.pid = self._process.pid
        self._arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=read_all, args=(self._connection, self._arrived), daemon=True)
        self._reader.start()
        try:
            started = self._receive("start", start_timeout_s)
            assert isinstance(started, CoreStarted), "a core says first that it has started"
        except BaseException:
            self._end_process()
            raise
        self.max_model_len = started.max_model_len
        self.vocab_size = started.vocab_size

    def add_request(self, request: EngineRequest) -> None:
        self._call("add_request", lambda call_id: AddRequest(call_id=call_id, request=request))
        self._unfinished.add(request.req_id)

    def abort_requests(self, req_ids: Iterable[str]) -> list[EngineCoreOutput]:
        # Those of a core that has ended have ended with it.
        names = [] if self._ended_by is not None else list(req_ids)
        if not names:
            return []
        answer = self._call("abort_requests", lambda call_id: AbortRequests(call_id=call_id, req_ids=names))
        self._unfinished.difference_update(names)
        # Their ids may be used again, so what steps brought them meanwhile is dropped.
        gone = set(names)
        for outputs in self._outputs:
            outputs[:] = [output for output in outputs if output.req_id not in gone]
        return answer.outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished or self._outputs)

    def on_loss(self, tell: Callable[[], None]) -> None:
        """The core itself replaces what it loses."""

    def step(self) -> list[EngineCoreOutput]:
        self._check_running()
        if not self._outputs:
            message = self._receive("step", self._call_timeout_s)
            assert isinstance(message, StepOutputs), "nothing but steps comes unasked"
            self._outputs.append(message.outputs)
        outputs = self._outputs.popleft()
        for output in outputs:
            if output.finish_reason is not None:
                self._unfinished.discard(output.req_id)
        return outputs

    def wait_for_work(self) -> None:
        """The core itself waits, before it says what its next step brought."""

    def wake(self) -> None:
        """End `step`: it seems to have brought nothing."""
        self._arrived.put(_NO_OUTPUTS)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        is_reset: bool = self._call_utility("reset_prefix_cache", reset_running_requests)
        return is_reset

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> list[Any]:
        call = ("collective_rpc", method, timeout_s, args, kwargs, unique_reply_rank)
        answers: list[Any] = self._call_utility(*call, wait_s=timeout_s)
        return answers

    def check_health(self) -> None:
        self._call_utility("check_health")

    def close(self) -> None:
        if not self._owner.is_here():
            return
        if self._ended_by is None:
            self._ended_by = LifecycleError("This engine was closed. Create a new one.")
            try:
                self._send(CloseCore())
            except OSError:
                logger.debug("The core's process had ended before it was told to")
            self._process.join(_END_TIMEOUT_S)
        if not self._connection.closed:
            self._end_process()

    def _call_utility(self, method: str, *args: Any, wait_s: float | None = None) -> Any:
        pickled = pickle.dumps(args)

        def make(call_id: int) -> UtilityCall:
            return UtilityCall(call_id=call_id, method=method, arguments=pickled)

        answer = self._call(method, make, wait_s)
        return pickle.loads(answer.result)

    def _call(
        self,
        name: str,
        make: Callable[[int], AddRequest | AbortRequests | UtilityCall],
        wait_s: float | None = None,
    ) -> Answer:
        """Send a call and wait for its answer; the outputs of steps that come before it are kept."""
        self._check_running()
        self._num_calls += 1
        call_id = self._num_calls
        try:
            self._send(make(call_id))
        except BlockingIOError:
            # A part of it may have been sent, so that nothing can follow.
            self._ended_by = self._timed_out(name, self._call_timeout_s)
            raise same_error(self._ended_by) from None
        except OSError:
            # What it said last, if only by its end, is still to be read.
            logger.debug("The core's process ended before %s reached it", name)
        timeout_s = wait_s or self._call_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._receive(name, timeout_s, deadline)
            if isinstance(message, StepOutputs):
                self._outputs.append(message.outputs)
            # Those of earlier calls come late, when nobody waits for them any more.
            elif isinstance(message, Answer) and message.call_id == call_id:
                if message.error is not None:
                    raise error_from_data(message.error)
                return message

    def _send(self, message: AddRequest | AbortRequests | UtilityCall | CloseCore) -> None:
        self._connection.send_bytes(encode(ToCore(message)))

    def _receive(
        self, name: str, timeout_s: float, deadline: float | None = None
    ) -> CoreStarted | StepOutputs | Answer:
        """The next that the core says, waited for until the deadline, which is that many seconds after the call."""
        left_s = timeout_s if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            data = self._arrived.get(timeout=left_s)
        except queue.Empty:
            raise self._timed_out(name, timeout_s) from None
        if data is None:
            raise self._died(name)
        message = decode(data, FromCore).message
        if isinstance(message, CoreEnded):
            self._ended_by = error_from_data(message.error)
            raise same_error(self._ended_by)
        return message

    def _check_running(self) -> None:
        self._owner.check()
        if self._ended_by is not None:
            raise same_error(self._ended_by)

    def _timed_out(self, name: str, timeout_s: float) -> WaitTimeout:
        return WaitTimeout(
            f"Process {os.getpid()} waited {timeout_s:g} s in {name} for the core in process {self.pid}, "
            "which hangs or is overloaded."
        )

    def _died(self, name: str) -> EngineDead:
        self._process.join(_EXIT_CODE_TIMEOUT_S)
        end = describe_end(self._process.exitcode)
        self._ended_by = EngineDead(f"The core's process {self.pid} {end} while {name} waited for it.")
        return EngineDead(*self._ended_by.args)

    def _end_process(self) -> None:
        """Make sure that nothing is left of it."""
        if self._process.is_alive():
            logger.debug("The core's process %s is killed", self.pid)
            self._process.kill()
        self._process.join(_END_TIMEOUT_S)
        self._reader.join(_END_TIMEOUT_S)
        self._connection.close()
        self._process.close()


def _let_go_in_fork() -> None:
    """A copy of a client must neither keep its connection open nor end its process, as Python's end would."""
    for client in list(_clients):
        client._connection.close()
        multiprocessing.process._children.discard(client._process)  # type: ignore[attr-defined]


_clients: weakref.WeakSet[CoreProcess] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_fork)


def start_core_process(config: EngineConfig) -> CoreProcess:
    """The engine core of this configuration, in a process of its own."""
    return CoreProcess(config)


def _start_process(
    config: EngineConfig, load_core: Callable[[EngineConfig], CoreClient], send_timeout_s: float
) -> tuple[SpawnProcess, Connection]:
    """A process that serves a core, and our end of the connection to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    for connection in (ours, theirs):
        limit_waits(connection, send_s=send_timeout_s)
    process = context.Process(target=run_core, args=(theirs, load_core, config), name="penstock-core", daemon=True)
    process.start()
    # Or the end of the process would not be the end of the connection.
    theirs.close()
    return process, ours
