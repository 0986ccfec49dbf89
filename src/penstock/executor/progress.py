"""Whether processes that are waited for compute or hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil

# A look every tenth of the limit, so that a process that stops in between is found out at 1.1 of it.
_LOOKS = 10
# What computing takes of a processor, however many others there are; those who wait for each other sleep.
_LEAST_SHARE = 0.01


class ProgressWatch:
    """Of processes that do something together: while any of them takes processor time, they get on.

    used_s: processor time that they have taken so far. limit_s: how long none of them may take any. longest_s: how
    long they may compute all in all.
    """

    def __init__(self, used_s: Callable[[], float], limit_s: float, longest_s: float) -> None:
        self._used_s = used_s
        self._limit_s, self._longest_s = limit_s, longest_s
        self.interval_s = limit_s / _LOOKS
        self._began = self._last_progress = time.monotonic()
        # When it was looked last, and the processor time until then.
        self._last_look: tuple[float, float] | None = None

    def look(self) -> str | None:
        """What is wrong, as the rest of a sentence about them; None if nothing is. To be called every `interval_s`."""
        now, used_s = time.monotonic(), self._used_s()
        if self._last_look is not None:
            then, used_then_s = self._last_look
            if used_s - used_then_s >= _LEAST_SHARE * (now - then):
                self._last_progress = now
        self._last_look = now, used_s
        if now - self._last_progress >= self._limit_s:
            return f"make no progress for {self._limit_s:g} s"
        return f"compute for more than {self._longest_s:g} s" if now - self._began >= self._longest_s else None


def processor_time(process_ids: Iterable[int]) -> float:
    """Of processes of this machine, in seconds."""
    return sum(map(_processor_time, process_ids))


def _processor_time(process_id: int) -> float:
    """0 of one that is gone, whose end is noticed elsewhere."""
    try:
        times = psutil.Process(process_id).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
