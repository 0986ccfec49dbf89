"""Supervised child process: started again after its loss, with exponential backoff."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from penstock.engine.core.restarts import FailureCount, restart_backoff_s
from penstock.engine.messages import CoreEnded, CoreMessage, CoreStarted, FrontStarted
from penstock.engine.processes.child_process import ChildProcess
from penstock.engine.processes.heartbeat import LONGEST_WAIT_S, Heartbeat
from penstock.errors import EngineDead, PenstockError, ProcessLost, WaitTimeout, error_from_data
from penstock.executor.processes import describe_end, where_to_look

logger = logging.getLogger(__name__)
# Interval at which the heartbeat is checked.
_CHECK_S = LONGEST_WAIT_S

Deliver = Callable[[ChildProcess, CoreMessage | None], None]


class SupervisedProcess:
    """Child process that is started again after its loss.

    name: in errors and logs, such as "the broker". start: starts the process, which delivers to the given callback.
    on_message: called with each message, in a reader thread.
    on_failure: called once with the error, in a reader thread, when the first process does not start, a process reports
        that its engine has failed for good, or restarts are exhausted.
    max_restarts: losses in a row, without half a minute in between, that are repaired.
    is_running: whether the current process has started and not ended. has_started: whether any has started.
    heartbeat_timeout_s: seconds without a message, after its start, after which the process is killed. Time in which
        this process was stopped does not count.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[Deliver], ChildProcess],
        *,
        on_message: Callable[[CoreMessage], None],
        on_failure: Callable[[PenstockError], None],
        max_restarts: int,
        heartbeat_timeout_s: float,
    ) -> None:
        self.name = name
        self.num_restarts = 0
        self.has_started = False
        self._start = start
        self._on_message = on_message
        self._on_failure = on_failure
        self._max_restarts = max_restarts
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._failures = FailureCount()
        self._error: PenstockError | None = None
        self.is_running = False
        self._is_wanted = True
        self._last_message = 0.0
        # Orders restarts and the end.
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._process = start(self._deliver)
        threading.Thread(target=self._watch, name="penstock-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        """Id of the current or last process."""
        return self._process.pid

    def send(self, data: bytes | bytearray) -> None:
        """Send an encoded `ToCore` to the current process; one that has exited drops it."""
        self._process.send(data)

    def expect_end(self) -> None:
        """Do not start the process again."""
        with self._lock:
            self._is_wanted = False

    def close(self, grace_s: float = 0.0) -> None:
        """Wait for the end of the process, `grace_s` seconds at most, then kill it."""
        self.expect_end()
        self._ended.set()
        self._process.close(grace_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of a process that is expected to end. Returns whether it has ended."""
        return self._ended.wait(timeout_s)

    def _deliver(self, process: ChildProcess, message: CoreMessage | None) -> None:
        self._last_message = time.monotonic()
        if message is None:
            self._handle_exit(process)
            return
        if isinstance(message, CoreEnded):
            self._error = error_from_data(message.error)
            return
        if isinstance(message, CoreStarted | FrontStarted):
            self._failures.note_start()
            self.is_running = self.has_started = True
        self._on_message(message)

    def _handle_exit(self, process: ChildProcess) -> None:
        """Start the process again, or report why not, in the reader thread of the process that has ended."""
        self.is_running = False
        if not self._is_wanted:
            self._ended.set()
            return
        reported, self._error = self._error, None
        exit_code = process.exit_code()
        error = reported or ProcessLost(
            f"{self.name}, process {process.pid}, {describe_end(exit_code)}. {where_to_look(exit_code)}"
        )
        process.close()
        self._failures.note_idle()
        self._failures.note(error)
        if not self.has_started or isinstance(error, EngineDead):
            self._fail(error)
        elif self._failures.number > self._max_restarts:
            dead = EngineDead(f"{self.name} was lost {self._failures.number} times in a row; the last time: {error}")
            dead.__cause__ = error
            self._fail(dead)
        else:
            logger.warning("%s It is started again", error)
            self._restart()

    def _restart(self) -> None:
        if self._ended.wait(restart_backoff_s(self._failures.number)):
            return
        with self._lock:
            if not self._is_wanted:
                self._ended.set()
                return
            self.num_restarts += 1
            try:
                self._process = self._start(self._deliver)
                return
            except OSError as os_error:
                error = EngineDead(f"{self.name} could not be started again: {os_error}.")
        self._fail(error)

    def _fail(self, error: PenstockError) -> None:
        self._is_wanted = False
        self._ended.set()
        self._on_failure(error)

    def _watch(self) -> None:
        silence = Heartbeat(self._heartbeat_timeout_s)
        last = time.monotonic()
        last_message = self._last_message
        while not self._ended.wait(_CHECK_S):
            now = time.monotonic()
            waited_s, last = now - last, now
            if not self.is_running or last_message != self._last_message:
                last_message = self._last_message
                silence.reset()
            elif silence.add_silence(waited_s):
                limit_s = self._heartbeat_timeout_s
                self._error = WaitTimeout(
                    f"{self.name}, process {self.pid}, has sent no heartbeat for {limit_s:g} s; it hangs."
                )
                self.is_running = False
                self._process.kill()
