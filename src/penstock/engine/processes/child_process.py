"""Handles of child processes that exchange messages with this one, and of an engine core in one."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from typing import Any, Protocol

from penstock.config import EngineConfig
from penstock.contract import ContractVersionError, decode
from penstock.device.limits import cpu_quota
from penstock.device.threads import plan_threads
from penstock.engine.messages import CoreEnded, CoreLog, CoreMessage, CoreStart, FromCore
from penstock.engine.processes.child_main import PROGRAM, ParentConnection
from penstock.engine.processes.core_server import ServedCore, serve_core
from penstock.errors import error_as_data
from penstock.executor.large_messages import send_message
from penstock.executor.processes import ProcessStarter, limit_waits
from penstock.executor.select import environment_of_core
from penstock.executor.serialization import dumps
from penstock.observability.logging import levels, write_sent

logger = logging.getLogger(__name__)
# Grace period of a process that was asked to shut down, or whose connection broke.
_END_TIMEOUT_S = 30.0
_EXIT_CODE_TIMEOUT_S = 2.0


class CoreHandle(Protocol):
    """Process with an engine core, or connection to one, as its supervisor sees it."""

    pid: int

    def send(self, data: bytes | bytearray) -> None:
        """Send an encoded `ToCore`; see `ChildProcess.send`."""

    def kill(self) -> None:
        """End it at once; its end is delivered after its messages."""

    def exit_code(self) -> int | None:
        """Exit code of a process whose end was delivered; None if there is none."""

    def close(self, grace_s: float = 0.0) -> None:
        """Wait for its end, `grace_s` seconds at most, then kill it, and free what it holds."""


class ChildProcess:
    """Starts a child process and delivers its messages.

    run: function that the process runs with `argument` and its connection to this process; pickled by its name.
    role: shown in the list of processes. who: prefix of its log records. environment: changes to that of this process.
    deliver: called with this object and each message, and with None at the end of the connection, in a reader thread,
        which also writes the process's log records.
    send_timeout_s: timeout of sending a message to the process. descriptors: inherited under the same numbers.

    An error of `run` comes as a message, `CoreEnded`. Raises ConfigError for an argument that cannot be pickled.
    """

    def __init__(
        self,
        run: Callable[[Any, ParentConnection], None],
        argument: Any,
        starter: ProcessStarter,
        deliver: Callable[[ChildProcess, CoreMessage | None], None],
        *,
        role: str,
        send_timeout_s: float,
        who: str = "",
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        start = CoreStart(sent=dumps("The configuration", (run, argument)), log_levels=levels())
        self._deliver = deliver
        self._who = who
        self._connection, theirs = Pipe()
        limit_waits(self._connection, send_s=send_timeout_s)
        # Only the child keeps its end of the connection, so that its exit closes the connection.
        with theirs:
            arguments = [os.getpid(), theirs.fileno(), role]
            self._process = starter.start(PROGRAM, arguments, [theirs.fileno(), *descriptors], environment or {})
        _processes.add(self)
        self.pid = self._process.pid
        self._has_ended = threading.Event()
        threading.Thread(target=self._read, name=f"penstock-child-{self.pid}", daemon=True).start()
        self.send(pickle.dumps(start))

    def send(self, data: bytes | bytearray) -> None:
        """Send an encoded `ToCore`. A process that has exited drops it; its end is delivered as None.

        Raises BlockingIOError on a timeout; the message may be partly sent, so that no other can follow it.
        """
        try:
            send_message(self._connection, data)
        except BlockingIOError:
            raise
        except OSError:
            # Its last messages and its end are still to be read.
            logger.debug("The child process %d exited before a message reached it", self.pid)

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
            logger.debug("The child process %d is killed", self.pid)
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
        except ContractVersionError as error:
            # The package was replaced while this process ran, and a new process has the other version.
            self.kill()
            self._deliver(self, CoreEnded(error=error_as_data(error)))
        except (EOFError, OSError):
            pass
        self._has_ended.set()
        self._deliver(self, None)


def start_core(
    config: EngineConfig,
    load_core: Callable[[EngineConfig], ServedCore],
    starter: ProcessStarter,
    deliver: Callable[[CoreHandle, CoreMessage | None], None],
    *,
    send_timeout_s: float,
) -> ChildProcess:
    """Start a process with the core of this configuration. load_core: loads the core there."""
    place, num_places = config.parallel.place(0)
    threads = plan_threads(config.device.num_threads, quota=cpu_quota(), rank=place, num_ranks=num_places)
    engine = config.parallel.engine_number
    return ChildProcess(
        serve_core,
        (load_core, config),
        starter,
        deliver,
        role="core",
        send_timeout_s=send_timeout_s,
        who="" if engine is None else f"Engine {engine}: ",
        environment={"OMP_NUM_THREADS": str(threads.num_threads), **environment_of_core(config)},
    )


def _close_in_fork() -> None:
    """Close the connections in a forked child, which must not keep them open."""
    for process in list(_processes):
        process._connection.close()


_processes: weakref.WeakSet[ChildProcess] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_fork)


class CoreOwner(Protocol):
    """Owner of cores, as the threads that read their messages see it."""

    def handle_exit(self) -> None:
        """Handle the end of a core's process, in the thread that read it."""


def deliver_to(
    owner: weakref.ref[CoreOwner], inbox: queue.SimpleQueue[tuple[CoreHandle, CoreMessage | None] | None]
) -> Callable[[CoreHandle, CoreMessage | None], None]:
    """Return the callback that queues a core's messages. It holds the owner by a weak reference, so that one which is
    garbage-collected ends its processes with their starter.
    """

    def deliver(process: CoreHandle, message: CoreMessage | None) -> None:
        inbox.put((process, message))
        if message is not None:
            return
        alive = owner()
        if alive is None:
            process.close()
        else:
            alive.handle_exit()

    return deliver
