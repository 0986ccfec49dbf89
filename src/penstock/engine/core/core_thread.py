"""Thread that runs the core's steps, for callers that must not block."""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.engine.core.core_client import CALL_TIMEOUT_S, START_TIMEOUT_S
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.guards import OwningProcess
from penstock.errors import EngineDead, LifecycleError, PenstockError, WaitTimeout, same_error

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class CoreThread:
    """Runs a core's steps while it has requests, and the commands of other threads between steps.

    start: creates the core, in the thread, to which the core may bind itself.
    on_end: called in the thread with the error that ended it.
    start_timeout_s, turn_timeout_s: timeouts of the start, and of a step or a command.

    Raises what `start` raises; WaitTimeout on a timeout.
    """

    def __init__(
        self,
        start: Callable[[], Dispatcher],
        on_end: Callable[[PenstockError], None],
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        turn_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self.owner = OwningProcess()
        self.turn_timeout_s = turn_timeout_s
        self._start = start
        self._on_end = on_end
        # Start of the current step or command in monotonic seconds; None between them.
        self._turn_began: float | None = None
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        # Orders `submit` and the end of the thread.
        self._lock = threading.Lock()
        self._ended_by: PenstockError | None = None
        self._wake: Callable[[], None] = lambda: None
        started: Future[Dispatcher] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="penstock-core", daemon=True)
        self._thread.start()
        try:
            self.dispatcher = self._wait_for(started, start_timeout_s)
        except BaseException:
            self.stop()
            raise
        self._wake = self.dispatcher.core.wake
        # An empty command wakes the thread, which then runs a step.
        self.dispatcher.core.on_loss(lambda: self._commands.put(_Command(lambda: None)))
        _running.add(self)

    @property
    def is_running(self) -> bool:
        return self._ended_by is None and self.owner.is_here()

    def submit(self, action: Callable[[], _Result]) -> Future[_Result]:
        """Run `action` in the thread before its next step; the future gets its result.

        Raises EngineDead or LifecycleError when the thread has ended, or is in another process.
        """
        self.owner.check()
        command = _Command(action)
        with self._lock:
            self.check_running()
            self._commands.put(command)
        self._wake()
        return command.future

    def call(self, what: str, action: Callable[[], _Result]) -> Coroutine[None, None, _Result]:
        """Run `action` in the thread before its next step; await the coroutine, in an event loop, for its result.

        what: name of the call in errors. Raises as `submit`; the coroutine WaitTimeout when the thread hangs.
        """
        return self._outcome(what, asyncio.wrap_future(self.submit(action)))

    async def _outcome(self, what: str, future: asyncio.Future[_Result]) -> _Result:
        """Result of a call, awaited for as long as the thread makes progress."""
        try:
            while not (await asyncio.wait([future], timeout=self.turn_timeout_s))[0]:
                self.check_progress(what)
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def check_running(self) -> None:
        """Raise EngineDead or LifecycleError when the thread has ended, or is in another process."""
        self.owner.check()
        if self._ended_by is not None:
            raise same_error(self._ended_by)

    def check_progress(self, what: str) -> None:
        """Raise WaitTimeout when the current step or command exceeds its timeout. what: name of the waiting call."""
        began = self._turn_began
        if began is not None and time.monotonic() - began > self.turn_timeout_s:
            raise self._timed_out(what, time.monotonic() - began)

    def stop(self) -> None:
        """End the thread after its current step and close the core, without waiting. Does nothing in a fork."""
        if self.owner.is_here():
            self._commands.put(_STOP)
            self._wake()

    def join(self) -> None:
        """Wait for the end of the thread. Raises WaitTimeout when its current step does not end."""
        if not self.owner.is_here():
            return
        self._thread.join(self.turn_timeout_s)
        if self._thread.is_alive():
            raise self._timed_out("shutdown", self.turn_timeout_s)

    def _wait_for(self, started: Future[Dispatcher], timeout_s: float) -> Dispatcher:
        try:
            return started.result(timeout_s)
        except TimeoutError:
            # `start` itself may raise a TimeoutError.
            if started.done():
                raise
            raise self._timed_out("start", timeout_s) from None

    def _timed_out(self, what: str, waited_s: float) -> WaitTimeout:
        return WaitTimeout(
            f"Thread {threading.current_thread().name} waited {waited_s:.3g} s in {what} for the core's thread "
            f"{self._thread.name}, which hangs or is overloaded."
        )

    def _run(self, started: Future[Dispatcher]) -> None:
        try:
            dispatcher = self._start()
        except BaseException as error:
            self._ended_by = EngineDead(f"The engine did not start: {error}")
            started.set_exception(error)
            return
        started.set_result(dispatcher)
        end: PenstockError = LifecycleError("This engine was shut down. Create another one.")
        try:
            self._serve(dispatcher)
        except EngineDead as error:
            end = error
        except BaseException as error:
            logger.exception("The core loop failed")
            end = EngineDead(f"The core loop failed with {type(error).__name__}: {error}")
            end.__cause__ = error
        self._end(dispatcher, end)

    def _serve(self, dispatcher: Dispatcher) -> None:
        while True:
            self._turn_began = None
            command = self._next_command(wait=not dispatcher.core.has_unfinished_requests())
            self._turn_began = time.monotonic()
            if command is _STOP:
                return
            if command is not None:
                command.run()
            else:
                dispatcher.step()
                dispatcher.core.wait_for_work()

    def _next_command(self, *, wait: bool) -> _Command | None:
        try:
            return self._commands.get(block=wait)
        except queue.Empty:
            return None

    def _end(self, dispatcher: Dispatcher, end: PenstockError) -> None:
        with self._lock:
            self._ended_by = end
        while (command := self._next_command(wait=False)) is not None:
            if command is not _STOP:
                command.future.set_exception(same_error(end))
        self._on_end(end)
        try:
            dispatcher.core.close()
        except Exception:
            logger.exception("The core could not be closed")


@dataclass(slots=True, eq=False)
class _Command:
    """A call to run between two steps, and the future of its result."""

    action: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.action()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


_STOP = _Command(lambda: None)
_running: weakref.WeakSet[CoreThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """End all core threads before the interpreter's shutdown, which must not interrupt a step."""
    threads = list(_running)
    for thread in threads:
        thread.stop()
    for thread in threads:
        try:
            thread.join()
        except WaitTimeout as error:
            logger.error("%s", error)
