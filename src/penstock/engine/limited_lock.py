"""A lock that nobody waits for without a limit."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from penstock.engine.core_client import CALL_TIMEOUT_S
from penstock.engine.owning_process import OwningProcess
from penstock.errors import WaitTimeout

_HANDOVER_S = 0.1


class LimitedLock:
    """Held by one thread at a time, which may take it several times over, of the process that made it.

    what: what its holder does, for the error. Entering it raises WaitTimeout after `timeout_s` seconds, LifecycleError
    in a forked process, where whoever held it in the first one may never let go.
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
        """Take it for good, which keeps other threads out. Raises WaitTimeout after `timeout_s` seconds."""
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
            # A thread that takes it again at once would get it first.
            time.sleep(_HANDOVER_S)
