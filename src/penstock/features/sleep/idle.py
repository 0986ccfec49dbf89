"""Watch over an idle core."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class IdleWatch:
    """Thread that calls a function when the core had no request for a while, once per use.

    seconds: without a use. on_idle: called in the thread.
    """

    def __init__(self, seconds: float, on_idle: Callable[[], None]) -> None:
        self._seconds, self._on_idle = seconds, on_idle
        self._last_use = time.monotonic()
        self._is_used = True
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="penstock-idle", daemon=True)
        self._thread.start()

    @property
    def idle_s(self) -> float:
        """Seconds since the last use."""
        return time.monotonic() - self._last_use

    @property
    def is_due(self) -> bool:
        """Whether it is idle for long enough."""
        return self.idle_s >= self._seconds

    def note_use(self) -> None:
        """Begin anew: a request has come or ended."""
        self._last_use, self._is_used = time.monotonic(), True

    def close(self) -> None:
        """End the thread; idempotent."""
        self._is_closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._is_closed.wait(max(0.01, self._seconds - self.idle_s) if self._is_used else self._seconds):
            if self._is_used and self.is_due:
                self._is_used = False
                self._on_idle()
