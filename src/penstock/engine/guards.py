"""Guards of an engine against forked processes, and against threads that hang."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType

from penstock.engine.core.core_client import CALL_TIMEOUT_S
from penstock.errors import LifecycleError, WaitTimeout

_HANDOVER_S = 0.1


class OwningProcess:
    """Process in which this object was created. A forked child has a copy, but none of its threads."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise LifecycleError in any other process."""
        if not self.is_here():
            raise LifecycleError(
                f"This engine was started in process {self._pid} and cannot be used in its forked child "
                f"{os.getpid()}. Start the child with the 'spawn' method (multiprocessing.get_context('spawn')), or "
                "create an engine in it."
            )


class LimitedLock:
    """Re-entrant lock with a timeout, bound to the process that created it.

    what: action of its holder, for the error. Entering it raises WaitTimeout after `timeout_s` seconds, and
    LifecycleError in a forked process, where a thread of the parent may have held it.
    """

    __slots__ = ("_holder", "_is_wanted", "_lock", "_timeout_s", "_what", "owner")

    def __init__(self, what: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._lock = threading.RLock()
        self._what = what
        self._timeout_s = timeout_s
        self._holder = 0
        self._is_wanted = False
        self.owner = OwningProcess()

    def __enter__(self) -> None:
        self.owner.check()
        self._acquire(self._timeout_s)

    def hold(self, timeout_s: float) -> None:
        """Acquire it for good. Raises WaitTimeout after `timeout_s` seconds."""
        self._is_wanted = True
        self._acquire(min(timeout_s, self._timeout_s))

    def _acquire(self, timeout_s: float) -> None:
        if not self._lock.acquire(timeout=timeout_s):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise WaitTimeout(
                f"Thread {threading.current_thread().name} waited {timeout_s:g} s for thread "
                f"{names.get(self._holder, self._holder)} to {self._what}, which hangs or is overloaded."
            )
        self._holder = threading.get_ident()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
        if self._is_wanted:
            # Yields to the waiting thread, before which this one could acquire it again.
            time.sleep(_HANDOVER_S)
