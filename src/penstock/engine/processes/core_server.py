"""Main loop of a core's process: runs steps, and answers its client's messages between them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

from penstock.config import EngineConfig
from penstock.contract import decode
from penstock.contract.feature import register_built_in_features
from penstock.engine.core.core_client import CoreClient
from penstock.engine.messages import (
    AbortRequests,
    AddRequest,
    Answer,
    CloseCore,
    CoreBusy,
    CoreStarted,
    StepOutputs,
    ToCore,
    UtilityCall,
)
from penstock.engine.processes.child_main import ParentConnection
from penstock.engine.statistics.step_log import StepLog
from penstock.engine.statistics.step_phases import PhaseTimer, StepPhase
from penstock.errors import ConfigError, error_as_data
from penstock.executor.serialization import dumps, loads

_Asked: TypeAlias = AddRequest | AbortRequests | UtilityCall | CloseCore
_UTILITIES = frozenset({"reset_prefix_cache", "collective_rpc", "stats", "watch_steps", "check_health"})
# Heartbeat interval while the core runs no steps because of a call or a recovery.
_HEARTBEAT_S = 0.2
# Wait for another request after one has arrived, so that a burst of requests enters the same step.
_BURST_S = 0.0005
# Queue entry that ends the wait for a message.
_WAKE = b""


class ServedCore(CoreClient, Protocol):
    """Interface of a core that can run in a process of its own.

    is_recovering: whether workers are being replaced. num_worker_restarts: replacements of them so far.
    kv_cache_bytes: size of the KV cache per worker. start_stage_s: seconds of the start by stage. phases: times of the
    steps. step_log: last steps.
    """

    phases: PhaseTimer
    step_log: StepLog

    @property
    def is_recovering(self) -> bool: ...

    @property
    def num_worker_restarts(self) -> int: ...

    @property
    def kv_cache_bytes(self) -> int: ...

    @property
    def start_stage_s(self) -> dict[str, float]: ...


def serve_core(argument: tuple[Callable[[EngineConfig], ServedCore], EngineConfig], parent: ParentConnection) -> None:
    """Load a core and serve it to the parent process. argument: function that loads it, and its configuration."""
    load_core, config = argument
    # Messages to any core may have their parts.
    register_built_in_features()
    core = load_core(config)
    try:
        parent.send(
            CoreStarted(
                max_model_len=core.max_model_len,
                vocab_size=core.vocab_size,
                kv_cache_bytes=core.kv_cache_bytes,
                stage_s=core.start_stage_s,
                stats=core.stats(),
            )
        )
        _Server(core, parent).run()
    finally:
        core.close()


class _Server:
    """Runs a core's steps and answers its client, until `CloseCore` or the end of the connection."""

    def __init__(self, core: ServedCore, parent: ParentConnection) -> None:
        self._core = core
        self._parent = parent
        self._arrived: queue.Queue[bytes | memoryview | None] = queue.Queue()
        self._is_answering = False
        self._num_restarts_sent = 0
        self._stats_sent = core.stats()

    def run(self) -> None:
        core = self._core
        ended = threading.Event()
        # A core without requests may have workers to replace.
        core.on_loss(lambda: self._arrived.put(_WAKE))
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._send_heartbeats, args=(ended,), daemon=True).start()
        try:
            while True:
                message: _Asked | None = None
                while (message := self._next(message)) is not None:
                    if isinstance(message, CloseCore):
                        return
                    answer = self._answer(message)
                    if isinstance(message, UtilityCall):
                        self._send_state()
                    self._parent.send(answer)
                self._step()
                core.wait_for_work()
        finally:
            ended.set()

    def _step(self) -> None:
        """Run a step, and send its outputs with what was counted since the last one."""
        core = self._core
        began = time.perf_counter()
        outputs = core.step()
        step_s = time.perf_counter() - began
        phase_s = core.phases.take()
        num_restarts = core.num_worker_restarts - self._num_restarts_sent
        self._num_restarts_sent += num_restarts
        self._stats_sent = core.stats()
        message = StepOutputs(
            outputs=outputs,
            stats=self._stats_sent,
            step_s=step_s,
            phase_s=phase_s,
            num_worker_restarts=num_restarts,
            recent_steps=core.step_log.take(step_s, is_last=not core.has_unfinished_requests()),
        )
        # The next message has the time of sending this one.
        core.phases.begin()
        self._parent.send(message)
        core.phases.end(StepPhase.SEND)

    def _send_changes(self) -> None:
        """Send what has changed since the last step: calls end requests as well, and no step may follow them."""
        stats, recent_steps = self._core.stats(), self._core.step_log.take(0.0, is_last=True)
        if recent_steps or stats != self._stats_sent:
            self._stats_sent = stats
            self._parent.send(StepOutputs(outputs=[], stats=stats, recent_steps=recent_steps))

    def _send_state(self) -> None:
        """Let the client know the core's state, before the answer to the call that has changed it."""
        stats = self._core.stats()
        if stats.state != self._stats_sent.state:
            self._stats_sent = stats
            self._parent.send(StepOutputs(outputs=[], stats=stats))

    def _read(self) -> None:
        try:
            while True:
                self._arrived.put(self._parent.receive())
                self._core.wake()
        except (EOFError, OSError):
            self._arrived.put(None)
            self._core.wake()

    def _send_heartbeats(self, ended: threading.Event) -> None:
        while not ended.wait(_HEARTBEAT_S):
            is_recovering = self._core.is_recovering
            if self._is_answering or is_recovering:
                try:
                    self._parent.send(CoreBusy(is_recovering=is_recovering))
                except OSError:
                    return

    def _next(self, last: _Asked | None) -> _Asked | None:
        """Next message of the client after `last`; None when the core should run a step first."""
        try:
            if not self._core.has_unfinished_requests():
                # A core without requests waits for its client, which knows by then that it has none.
                self._send_changes()
                data = self._arrived.get()
            elif isinstance(last, AddRequest):
                data = self._arrived.get(timeout=_BURST_S)
            else:
                data = self._arrived.get(block=False)
        except queue.Empty:
            return None
        if data == _WAKE:
            return None
        return CloseCore() if data is None else decode(data, ToCore).message

    def _answer(self, message: AddRequest | AbortRequests | UtilityCall) -> Answer:
        try:
            if isinstance(message, AddRequest):
                self._core.add_request(message.request)
                return Answer(call_id=message.call_id)
            if isinstance(message, AbortRequests):
                self._core.abort_requests(message.req_ids)
                return Answer(call_id=message.call_id)
            self._is_answering = True
            return Answer(call_id=message.call_id, result=call_utility(self._core, message))
        except BaseException as error:
            return Answer(call_id=message.call_id, error=error_as_data(error))
        finally:
            self._is_answering = False


def call_utility(core: CoreClient, message: UtilityCall) -> bytes:
    """Call a method of a core for another process. Returns the pickled result."""
    if message.method not in _UTILITIES:
        raise ConfigError(f"A core has no method {message.method!r} to be called. Allowed: {sorted(_UTILITIES)}.")
    result = getattr(core, message.method)(*loads(message.arguments))
    return dumps(f"The answer of {message.method}", result)
