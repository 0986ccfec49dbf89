"""Turns of a core without requests, for features that wait for their workers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.scheduler.scheduler import Scheduler


class IdleTurns:
    """Timer for turns of a core that has none by itself, since it has no requests.

    call_soon: as `SchedulerServices.call_soon`.
    """

    def __init__(self, scheduler: Scheduler, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._scheduler, self._call_soon = scheduler, call_soon
        self._timer: threading.Timer | None = None

    def want(self, seconds: float) -> None:
        """Let a core without requests have its next turn after so many seconds, if none is due before."""
        if self._timer is None and not self._scheduler.has_unfinished_requests():
            self._timer = threading.Timer(seconds, self._call_soon, (self._end,))
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self._timer = None
