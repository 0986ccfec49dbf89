"""Handle of an engine core in a process of its own."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import threading
import weakref
from collections.abc import Callable
from multiprocessing import Pipe

from penstock.config import EngineConfig
from penstock.contract import decode
from penstock.device.limits import cpu_quota
from penstock.device.threads import plan_threads
from penstock.engine.core_server import PROGRAM, ServedCore
from penstock.engine.messages import CoreLog, CoreMessage, CoreStart, FromCore
from penstock.executor.processes import ProcessStarter, limit_waits
from penstock.executor.select import environment_of_core
from penstock.executor.serialization import dumps
from penstock.observability.logging import levels, write_sent

logger = logging.getLogger(__name__)
# Grace period of a process that was asked to shut down, or whose connection broke.
_END_TIMEOUT_S = 30.0
_EXIT_CODE_TIMEOUT_S = 2.0


class CoreProcess:
    """Starts a core's process and delivers its messages.

    load_core: creates the core in the process; it is pickled by its name.
    deliver: called with this object and each message, and with None at the end of the connection, in a reader thread,
        which also writes the process's log records.
    send_timeout_s: timeout of sending a message to the process.

    An error of loading the core comes as its first message. Raises ConfigError for a configuration that cannot be
    pickled.
    """

    def __init__(
        self,
        config: EngineConfig,
        load_core: Callable[[EngineConfig], ServedCore],
        starter: ProcessStarter,
        deliver: Callable[[CoreProcess, CoreMessage | None], None],
        *,
        send_timeout_s: float,
    ) -> None:
        sent = dumps("The configuration", (load_core, config))
        start = CoreStart(sent=sent, log_levels=levels())
        place, num_places = config.parallel.place(0)
        threads = plan_threads(config.device.num_threads, quota=cpu_quota(), rank=place, num_ranks=num_places)
        self._deliver = deliver
        engine = config.parallel.engine_number
        self._who = "" if engine is None else f"Engine {engine}: "
        self._connection, theirs = Pipe()
        limit_waits(self._connection, send_s=send_timeout_s)
        # Only the child keeps its end of the connection, so that its exit closes the connection.
        with theirs:
            environment = {"OMP_NUM_THREADS": str(threads.num_threads), **environment_of_core(config)}
            self._process = starter.start(PROGRAM, [os.getpid(), theirs.fileno()], [theirs.fileno()], environment)
        _processes.add(self)
        self.pid = self._process.pid
        self._has_ended = threading.Event()
        threading.Thread(target=self._read, name=f"penstock-core-{self.pid}", daemon=True).start()
        self.send(pickle.dumps(start))

    def send(self, data: bytes) -> None:
        """Send an encoded `ToCore`. A process that has exited drops it; its end is delivered as None.

        Raises BlockingIOError on a timeout; the message may be partly sent, so that no other can follow it.
        """
        try:
            self._connection.send_bytes(data)
        except BlockingIOError:
            raise
        except OSError:
            # Its last messages and its end are still to be read.
            logger.debug("The core's process %d exited before a message reached it", self.pid)

    def kill(self) -> None:
        """Kill the process; its end is delivered after its messages."""
        self._process.kill()

    def exit_code(self) -> int | None:
        """Exit code of a process whose end was delivered; None if it has not exited within `_EXIT_CODE_TIMEOUT_S`."""
        try:
            return self._process.wait(_EXIT_CODE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None

    def close(self, grace_s: float = 0.0) -> None:
        """Wait for the process to exit, then kill it. grace_s: seconds to wait."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            logger.debug("The core's process %d is killed", self.pid)
            self._process.kill()
            self._process.wait()
        # The reader thread may wait for a lock of this caller while it delivers the end.
        self._has_ended.wait(_END_TIMEOUT_S)
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                message = decode(self._connection.recv_bytes(), FromCore).message
                if isinstance(message, CoreLog):
                    write_sent(message.fields, self._who)
                else:
                    self._deliver(self, message)
        except (EOFError, OSError):
            self._has_ended.set()
            self._deliver(self, None)


def _close_in_fork() -> None:
    """Close the connections in a forked child, which must not keep them open."""
    for process in list(_processes):
        process._connection.close()


_processes: weakref.WeakSet[CoreProcess] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_fork)
