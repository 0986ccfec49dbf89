"""A core in a process of its own, as whoever started it sees it."""

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
from penstock.engine.messages import CoreLog, CoreStart, FromCore, SaidByCore
from penstock.executor.processes import ProcessStarter, limit_waits
from penstock.executor.program import main_path, pickled
from penstock.executor.select import environment_of_core
from penstock.observability.logging import levels, write_sent

logger = logging.getLogger(__name__)
# How long a process that was told to end, or whose connection broke, is given to do so.
_END_TIMEOUT_S = 30.0
_EXIT_CODE_TIMEOUT_S = 2.0


class CoreProcess:
    """Starts the process, and hands on what it says.

    load_core: makes the core there; it is pickled by its name.
    deliver: gets this object with each message, and with None at the end of the connection, in a thread of its own,
        which also writes what there is for the log.
    send_timeout_s: how long the process may take to read a message.

    It starts even if its core cannot, which is then the first that it says. Raises ConfigError for what cannot be sent.
    """

    def __init__(
        self,
        config: EngineConfig,
        load_core: Callable[[EngineConfig], ServedCore],
        starter: ProcessStarter,
        deliver: Callable[[CoreProcess, SaidByCore | None], None],
        *,
        send_timeout_s: float,
    ) -> None:
        sent = pickled("The configuration", (load_core, config))
        start = CoreStart(sent=sent, main_path=main_path(), log_levels=levels())
        place, num_places = config.parallel.place(0)
        threads = plan_threads(config.device.num_threads, quota=cpu_quota(), rank=place, num_ranks=num_places)
        self._deliver = deliver
        engine = config.parallel.engine_number
        self._who = "" if engine is None else f"Engine {engine}: "
        self._connection, theirs = Pipe()
        limit_waits(self._connection, send_s=send_timeout_s)
        # The end of the process is to be the end of the connection, so nobody else keeps that end.
        with theirs:
            environment = {"OMP_NUM_THREADS": str(threads.num_threads), **environment_of_core(config)}
            self._process = starter.start(PROGRAM, [os.getpid(), theirs.fileno()], [theirs.fileno()], environment)
        _processes.add(self)
        self.pid = self._process.pid
        self._has_ended = threading.Event()
        threading.Thread(target=self._read, name=f"penstock-core-{self.pid}", daemon=True).start()
        self.send(pickle.dumps(start))

    def send(self, data: bytes) -> None:
        """Say something: a `ToCore`, encoded. A process that has ended does not hear it, and its end is delivered.

        Raises BlockingIOError for one that does not read; a part may have been sent, so that nothing can follow.
        """
        try:
            self._connection.send_bytes(data)
        except BlockingIOError:
            raise
        except OSError:
            # What it said last, if only by its end, is still to be read.
            logger.debug("The core's process %d ended before something reached it", self.pid)

    def kill(self) -> None:
        """Its end is delivered, behind all that it has said."""
        self._process.kill()

    def exit_code(self) -> int | None:
        """Of a process whose end was delivered; None where it has not ended, as far as is known."""
        try:
            return self._process.wait(_EXIT_CODE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None

    def close(self, grace_s: float = 0.0) -> None:
        """Make sure that nothing is left of it, after a while to end by itself."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            logger.debug("The core's process %d is killed", self.pid)
            self._process.kill()
            self._process.wait()
        # A reader that delivers the end may be waiting for whoever calls this.
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


def _let_go_in_fork() -> None:
    """A copy must not keep the connection open."""
    for process in list(_processes):
        process._connection.close()


_processes: weakref.WeakSet[CoreProcess] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_fork)
