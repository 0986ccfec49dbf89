"""Connection of a front end to the broker, in place of a core's process."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

from penstock.config import EngineConfig
from penstock.contract import decode
from penstock.engine.messages import BrokerStatus, CoreMessage, FromCore
from penstock.engine.processes.child_process import CoreHandle
from penstock.engine.processes.core_group import CoreGroup
from penstock.engine.statistics.step_log import StepRecord
from penstock.executor.large_messages import send_message
from penstock.executor.processes import limit_waits

# Longest wait for a broker that takes no messages.
_SEND_TIMEOUT_S = 30.0
# Steps that a live view can show.
_NUM_RECENT_STEPS = 500


class BrokerState:
    """Last heartbeat of the broker, for any thread: its status, None at first, and its time in monotonic seconds.

    recent_steps: last steps of the cores while a live view watches, each with its core's number, oldest first.
    lost_at: time at which the last connection to a broker ended, and the replacement of the broker began.
    """

    def __init__(self) -> None:
        self.status: BrokerStatus | None = None
        self.received_at = time.monotonic()
        self.recent_steps: deque[tuple[int, StepRecord]] = deque(maxlen=_NUM_RECENT_STEPS)
        self.lost_at = -math.inf

    def note(self, status: BrokerStatus) -> None:
        self.status, self.received_at = status, time.monotonic()
        self.recent_steps.extend((core, step) for core, steps in enumerate(status.recent_steps) for step in steps)

    def note_loss(self) -> None:
        self.lost_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat."""
        return time.monotonic() - self.received_at

    @property
    def idle_s(self) -> float:
        """Seconds since the last heartbeat, or since the replacement of the broker began."""
        return time.monotonic() - max(self.received_at, self.lost_at)


def connect_to_broker(path: str, config: EngineConfig, state: BrokerState) -> CoreGroup:
    """Connect to the broker at a Unix socket, and wait until its cores have started.

    After the loss of a broker the client connects again, and its requests continue from the tokens received.
    """
    return CoreGroup(config, connect=lambda deliver: BrokerConnection(path, state, deliver))


class BrokerConnection:
    """Connection to a broker. deliver: gets its messages, and None at the end of the connection, in a reader thread."""

    # The broker's launcher knows its process.
    pid = 0

    def __init__(
        self, path: str, state: BrokerState, deliver: Callable[[CoreHandle, CoreMessage | None], None]
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._connection = Connection(self._socket.fileno())
        limit_waits(self._connection, send_s=_SEND_TIMEOUT_S)
        self._state = state
        self._deliver = deliver
        self._has_ended = threading.Event()
        threading.Thread(target=self._read, name="penstock-broker", daemon=True).start()

    def send(self, data: bytes | bytearray) -> None:
        """As `ChildProcess.send`."""
        try:
            send_message(self._connection, data)
        except BlockingIOError:
            raise
        except OSError:
            # The reader thread delivers the end.
            pass

    def kill(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def exit_code(self) -> int | None:
        return None

    def close(self, grace_s: float = 0.0) -> None:
        """Close the connection; the broker aborts the requests of this front end."""
        self.kill()
        # The reader thread may wait for a lock of this caller while it delivers the end.
        self._has_ended.wait(_SEND_TIMEOUT_S)
        self._socket.detach()
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                message = decode(self._connection.recv_bytes(), FromCore).message
                if isinstance(message, BrokerStatus):
                    self._state.note(message)
                self._deliver(self, message)  # type: ignore[arg-type]
        except (EOFError, OSError):
            self._has_ended.set()
            self._state.note_loss()
            self._deliver(self, None)
