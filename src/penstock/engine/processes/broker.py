"""Broker: process that owns the engine cores and serves any number of front ends."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.config.queue import QueueLimits
from penstock.contract import decode, encode
from penstock.engine.messages import (
    AbortRequests,
    AddRequest,
    Answer,
    BrokerStatus,
    CloseCore,
    CoreMessage,
    CoreStarted,
    FeaturesChanged,
    FromCore,
    StepOutputs,
    ToCore,
    UtilityCall,
)
from penstock.engine.processes.admission import Admission
from penstock.engine.processes.child_main import ParentConnection
from penstock.engine.processes.core_answers import status_of
from penstock.engine.processes.core_group import CoreGroup, load_engine_core
from penstock.engine.processes.core_server import ServedCore, call_utility
from penstock.engine.processes.supervisor import EngineSupervisor
from penstock.errors import PenstockError, error_as_data
from penstock.executor.large_messages import receive_message
from penstock.executor.processes import limit_waits
from penstock.executor.serialization import dumps, loads
from penstock.scheduler.outputs import EngineCoreOutput

logger = logging.getLogger(__name__)
_HEARTBEAT_S = 0.25
# Entry of the queue of messages for a new front end; no message is empty.
_HELLO = b""
# Timeout of a message that a front end has begun to take.
_SEND_TIMEOUT_S = 1.0
# Time after which a front end that takes no messages is given up, and its requests are aborted.
_STUCK_S = 60.0
# Size of a socket's send buffer, as far as the system allows.
_SEND_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class BrokerArguments:
    """Arguments of a broker's process.

    descriptor: of the Unix socket, listening, to which front ends connect. load_core: loads a core in its process.
    features: state of the last `FeaturesChanged` of the broker before; None for the first one.
    """

    config: EngineConfig
    limits: QueueLimits
    descriptor: int
    load_core: Callable[[EngineConfig], ServedCore] = load_engine_core
    features: bytes | None = None


def serve_fronts(arguments: BrokerArguments, parent: ParentConnection) -> None:
    """Start the cores and serve front ends, until the parent asks for the end or closes its connection.

    Raises what starting the cores raises; EngineDead when their restarts are exhausted.
    """
    with contextlib.suppress(_Ended), contextlib.closing(Broker(arguments, parent)) as broker:
        broker.run()


class _Ended(BaseException):
    """The parent has asked for the end, or has ended, while the broker waits for its cores."""


class FrontEnd:
    """Connection of one front end.

    req_ids: its unfinished requests. stuck_since: since when it has taken no message, in monotonic seconds; or None.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLOUT)
        self._pending: list[CoreMessage] = []
        self.req_ids: set[str] = set()
        self.stuck_since: float | None = None
        self.is_gone = False

    def receive(self) -> bytes | memoryview:
        return receive_message(self._connection)

    def send(self, message: CoreMessage) -> None:
        """Send a message, or queue it while the front end takes none; queued outputs become one message."""
        last = self._pending[-1] if self._pending else None
        if isinstance(last, StepOutputs) and isinstance(message, StepOutputs):
            last.outputs.extend(message.outputs)
        elif not (isinstance(message, BrokerStatus) and self._pending):
            self._pending.append(message)
        self.flush()

    def flush(self) -> None:
        """Send queued messages as far as the front end takes them."""
        while self._pending and not self.is_gone:
            try:
                if not self._poll.poll(0):
                    self.stuck_since = self.stuck_since or time.monotonic()
                    return
                self._connection.send_bytes(encode(FromCore(self._pending[0])))
            except OSError:
                # Also a timeout, after which the connection has a part of a message. Its reader thread sees the end.
                self.close()
                return
            self.stuck_since = None
            self._pending.pop(0)

    def close(self) -> None:
        """End the connection; the reader thread sees it."""
        self.is_gone = True
        self._pending.clear()
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as shared:
            shared.shutdown(socket.SHUT_RDWR)


class Broker:
    """Owns the requests of all front ends: routes their messages to the cores, and the cores' outputs to them.

    A front end that ends, or takes no messages for a minute, loses its requests, and no other is affected. Front ends
    may connect while the cores start, and get heartbeats.

    Raises what starting the cores raises.
    """

    def __init__(self, arguments: BrokerArguments, parent: ParentConnection) -> None:
        config = arguments.config
        self._num_engines = config.parallel.num_engines_here
        self._admission = Admission(arguments.limits, config.scheduler.max_num_seqs * self._num_engines)
        self._listener = socket.socket(fileno=arguments.descriptor)
        self._parent = parent
        self._fronts: set[FrontEnd] = set()
        self._owners: dict[str, FrontEnd] = {}
        # Calls of requests that no core has answered.
        self._call_ids: dict[str, int] = {}
        # Messages of front ends; None for the end of a connection, or of the broker. The first entry of a front end is
        # `_HELLO`.
        self._arrived: queue.SimpleQueue[tuple[FrontEnd | None, bytes | memoryview | None]] = queue.SimpleQueue()
        self._status_due_at = 0.0
        # Whether a feature's state has changed, such as by a sleep: front ends know of it before the answer.
        self._has_changed = False
        self._wake: Callable[[], None] = lambda: None
        self._engines: Sequence[EngineSupervisor] = ()
        self._has_ended = False
        threading.Thread(target=self._read_parent, name="penstock-parent", daemon=True).start()
        threading.Thread(target=self._accept, name="penstock-accept", daemon=True).start()
        self._group = CoreGroup(
            config,
            arguments.load_core,
            while_waiting=self._while_waiting,
            features=None if arguments.features is None else loads(arguments.features),
            on_features=self._keep_features,
        )
        self._engines = self._group.engines
        self._wake = self._group.wake
        self._started = CoreStarted(
            max_model_len=self._group.max_model_len,
            vocab_size=self._group.vocab_size,
            kv_cache_bytes=0,
            stage_s=self._group.slowest_start_s,
        )

    def run(self) -> None:
        """Serve until the parent asks for the end. Raises EngineDead when the cores have failed for good."""
        self._group.on_admission(self._answer_admission)
        self._parent.send(self._started)
        for front in self._fronts:
            self._welcome(front)
        while not self._has_ended:
            while not self._arrived.empty():
                sender, data = self._arrived.get()
                if sender is not None:
                    self._handle(sender, data)
            self._deliver(self._group.step())

    def close(self) -> None:
        """Close the cores."""
        self._group.close()

    def _keep_features(self, states: Mapping[str, Any]) -> None:
        """Let the parent keep the features' states; a front end gets its answer after that."""
        self._has_changed = True
        self._parent.send(FeaturesChanged(states=dumps("The states of features", states)))

    def _while_waiting(self) -> None:
        """Send heartbeats while the cores start; deliver outputs too during a long call of a front end.

        Raises _Ended when the parent has asked for the end.
        """
        if self._has_ended:
            raise _Ended
        if self._engines:
            self._deliver(self._group.take_outputs())
            return
        # A front end sends its first message once the cores have started.
        while not self._arrived.empty():
            front, data = self._arrived.get()
            if front is not None and data == _HELLO:
                self._fronts.add(front)
            elif front is not None:
                self._fronts.discard(front)
        self._deliver([])

    def _handle(self, front: FrontEnd, data: bytes | memoryview | None) -> None:
        if data is None:
            self._remove(front)
        elif data == _HELLO:
            self._fronts.add(front)
            self._welcome(front)
        elif front in self._fronts:
            message = decode(data, ToCore).message
            if isinstance(message, AddRequest):
                self._add(front, message)
            elif isinstance(message, AbortRequests):
                self._abort([req_id for req_id in message.req_ids if self._owners.get(req_id) is front])
                front.send(Answer(call_id=message.call_id))
            elif isinstance(message, UtilityCall):
                answer = self._call(message)
                if self._has_changed:
                    self._has_changed = False
                    self._send_status(time.monotonic())
                front.send(answer)

    def _welcome(self, front: FrontEnd) -> None:
        """Tell a front end that the cores have started; the status comes first, so that it is ready from then on."""
        front.send(self._status())
        front.send(self._started)

    def _add(self, front: FrontEnd, message: AddRequest) -> None:
        request = message.request
        if request.is_admitted and request.req_id in self._owners:
            # Its front end has connected again, and the end of the earlier connection has not been handled yet.
            self._abort([request.req_id])
        try:
            self._admission.check(request)
            self._group.add_request(request)
        except PenstockError as error:
            front.send(Answer(call_id=message.call_id, error=error_as_data(error)))
            return
        self._admission.add(request)
        self._owners[request.req_id] = front
        self._call_ids[request.req_id] = message.call_id
        front.req_ids.add(request.req_id)

    def _answer_admission(self, req_id: str, error: PenstockError | None) -> None:
        front, call_id = self._owners.get(req_id), self._call_ids.pop(req_id, None)
        if front is None or call_id is None:
            return
        if error is not None:
            self._forget(req_id)
        front.send(Answer(call_id=call_id, error=None if error is None else error_as_data(error)))

    def _abort(self, req_ids: list[str]) -> None:
        self._group.abort_requests(req_ids)
        for req_id in req_ids:
            self._forget(req_id)

    def _forget(self, req_id: str) -> None:
        self._admission.remove(req_id)
        self._call_ids.pop(req_id, None)
        front = self._owners.pop(req_id, None)
        if front is not None:
            front.req_ids.discard(req_id)

    def _call(self, message: UtilityCall) -> Answer:
        try:
            return Answer(call_id=message.call_id, result=call_utility(self._group, message))
        except Exception as error:
            return Answer(call_id=message.call_id, error=error_as_data(error))

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        """Send outputs to their front ends, and heartbeats when they are due."""
        by_front: dict[FrontEnd, list[EngineCoreOutput]] = {}
        for output in outputs:
            front = self._owners.get(output.req_id)
            if front is None:
                continue
            by_front.setdefault(front, []).append(output)
            self._admission.note_output(output.req_id)
            if output.finish_reason is not None:
                self._forget(output.req_id)
        for front, own in by_front.items():
            front.send(StepOutputs(outputs=own))
        now = time.monotonic()
        if now >= self._status_due_at:
            self._status_due_at = now + _HEARTBEAT_S
            self._send_status(now)

    def _send_status(self, now: float) -> None:
        status = self._status()
        self._parent.send(status)
        recent_steps = [engine.take_recent_steps() for engine in self._engines]
        if any(recent_steps):
            status = replace(status, recent_steps=recent_steps)
        for front in self._fronts:
            front.send(status)
            if front.stuck_since is not None and now - front.stuck_since > _STUCK_S:
                logger.warning(
                    "A front end has taken no messages for %g s; its %d requests end", _STUCK_S, len(front.req_ids)
                )
                front.close()

    def _remove(self, front: FrontEnd) -> None:
        self._fronts.discard(front)
        if front.req_ids:
            logger.warning("A front end is gone; its %d requests end", len(front.req_ids))
            self._abort(list(front.req_ids))

    def _status(self) -> BrokerStatus:
        admission = self._admission
        return replace(
            status_of(self._engines, self._num_engines),
            num_requests=admission.num_requests,
            num_queued_requests=admission.num_queued_requests,
            num_queued_tokens=admission.num_queued_tokens,
            num_refused=admission.num_refused,
        )

    def _put(self, front: FrontEnd | None, data: bytes | memoryview | None) -> None:
        self._arrived.put((front, data))
        self._wake()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                # Such as too many open files.
                logger.error("A front end could not connect: %s", error)
                time.sleep(_HEARTBEAT_S)
                continue
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            connection = Connection(accepted.detach())
            limit_waits(connection, send_s=_SEND_TIMEOUT_S)
            front = FrontEnd(connection)
            self._put(front, _HELLO)
            threading.Thread(target=self._read, args=(front,), name="penstock-front", daemon=True).start()

    def _read(self, front: FrontEnd) -> None:
        try:
            while True:
                self._put(front, front.receive())
        except (EOFError, OSError):
            self._put(front, None)

    def _read_parent(self) -> None:
        try:
            while not isinstance(decode(self._parent.receive(), ToCore).message, CloseCore):
                pass
        except (EOFError, OSError):
            pass
        self._has_ended = True
        self._put(None, None)
