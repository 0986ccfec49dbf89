"""Main loop of a core's process: runs steps, and answers its client's messages between them."""

from __future__ import annotations

import contextlib
import pickle
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Protocol, TypeAlias

from penstock.contract import decode, encode
from penstock.engine.core_client import CoreClient
from penstock.engine.messages import (
    AbortRequests,
    AddRequest,
    Answer,
    CloseCore,
    CoreBusy,
    CoreEnded,
    CoreLog,
    CoreMessage,
    CoreStart,
    CoreStarted,
    FromCore,
    StepOutputs,
    ToCore,
    UtilityCall,
)
from penstock.errors import ConfigError, error_as_data
from penstock.executor.processes import end_with_parent, leave_end_to_parent
from penstock.executor.serialization import dumps, loads
from penstock.observability.logging import send_log

_Asked: TypeAlias = AddRequest | AbortRequests | UtilityCall | CloseCore
PROGRAM = "from penstock.engine.core_server import main; main()"
_UTILITIES = frozenset({"reset_prefix_cache", "collective_rpc", "stats", "check_health"})
# Heartbeat interval while the core runs no steps because of a call or a recovery.
_HEARTBEAT_S = 0.2
# Wait for another request after one has arrived, so that a burst of requests enters the same step.
_BURST_S = 0.0005
# Queue entry that ends the wait for a message.
_WAKE = b""


class ServedCore(CoreClient, Protocol):
    """Interface of a core that can run in a process of its own.

    is_recovering: whether workers are being replaced. kv_cache_bytes: size of the KV cache per worker.
    """

    @property
    def is_recovering(self) -> bool: ...

    @property
    def kv_cache_bytes(self) -> int: ...


def main() -> None:
    """Run a core's process. Arguments: id of the parent process, and descriptor of the connection to it."""
    parent, descriptor = map(int, sys.argv[1:])
    end_with_parent(parent)
    leave_end_to_parent()
    outbox = _Outbox(Connection(descriptor))
    try:
        start: CoreStart = pickle.loads(outbox.connection.recv_bytes())
        send_log(start.log_levels, outbox.log)
        load_core, config = loads(start.sent)
        core: ServedCore = load_core(config)
        try:
            outbox.send(
                CoreStarted(
                    max_model_len=core.max_model_len, vocab_size=core.vocab_size, kv_cache_bytes=core.kv_cache_bytes
                )
            )
            _Server(core, outbox).run()
        finally:
            core.close()
    except BaseException as error:
        with contextlib.suppress(OSError):
            outbox.send(CoreEnded(error=error_as_data(error)))
        raise SystemExit(1) from error


class _Outbox:
    """Sending end of the connection, for several threads."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, message: CoreMessage | CoreLog) -> None:
        data = encode(FromCore(message))
        with self._lock:
            self.connection.send_bytes(data)

    def log(self, fields: dict[str, str | int | float]) -> None:
        """Send a log record, unless the connection is closed."""
        with contextlib.suppress(OSError):
            self.send(CoreLog(fields=fields))


class _Server:
    """Runs a core's steps and answers its client, until `CloseCore` or the end of the connection."""

    def __init__(self, core: ServedCore, outbox: _Outbox) -> None:
        self._core = core
        self._outbox = outbox
        self._arrived: queue.Queue[bytes | None] = queue.Queue()
        self._is_answering = False

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
                    self._outbox.send(self._answer(message))
                self._outbox.send(StepOutputs(outputs=core.step(), stats=core.stats()))
                core.wait_for_work()
        finally:
            ended.set()

    def _read(self) -> None:
        try:
            while True:
                self._arrived.put(self._outbox.connection.recv_bytes())
                self._core.wake()
        except (EOFError, OSError):
            self._arrived.put(None)
            self._core.wake()

    def _send_heartbeats(self, ended: threading.Event) -> None:
        while not ended.wait(_HEARTBEAT_S):
            if self._is_answering or self._core.is_recovering:
                try:
                    self._outbox.send(CoreBusy())
                except OSError:
                    return

    def _next(self, last: _Asked | None) -> _Asked | None:
        """Next message of the client after `last`; None when the core should run a step first."""
        try:
            if not self._core.has_unfinished_requests():
                # A core without requests waits for its client.
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
            return Answer(call_id=message.call_id, result=self._call(message))
        except BaseException as error:
            return Answer(call_id=message.call_id, error=error_as_data(error))
        finally:
            self._is_answering = False

    def _call(self, message: UtilityCall) -> bytes:
        if message.method not in _UTILITIES:
            raise ConfigError(f"A core has no method {message.method!r} to be called. Allowed: {sorted(_UTILITIES)}.")
        result = getattr(self._core, message.method)(*loads(message.arguments))
        return dumps(f"The answer of {message.method}", result)
