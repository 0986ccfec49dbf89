"""Watchdog that tells computing processes from hanging ones by their CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil

# Checks per limit: a process that stops in between is found at 1.1 times the limit.
_CHECKS = 10
# Least share of a CPU of a computing process, on a busy machine too; processes that wait for each other sleep.
_LEAST_SHARE = 0.01


class ProgressWatch:
    """Watchdog of processes that work together: they make progress while any of them takes CPU time.

    used_s: their CPU time so far. limit_s: timeout without any CPU time. longest_s: timeout in all.
    """

    def __init__(self, used_s: Callable[[], float], limit_s: float, longest_s: float) -> None:
        self._used_s = used_s
        self._limit_s, self._longest_s = limit_s, longest_s
        self.interval_s = limit_s / _CHECKS
        self._began = self._last_progress = time.monotonic()
        # Time and CPU time of the last check.
        self._last_check: tuple[float, float] | None = None

    def check(self) -> str | None:
        """Return the failure, as the rest of a sentence; None if there is none. To be called every `interval_s`."""
        now, used_s = time.monotonic(), self._used_s()
        if self._last_check is not None:
            then, used_then_s = self._last_check
            if used_s - used_then_s >= _LEAST_SHARE * (now - then):
                self._last_progress = now
        self._last_check = now, used_s
        if now - self._last_progress >= self._limit_s:
            return f"make no progress for {self._limit_s:g} s"
        return f"compute for more than {self._longest_s:g} s" if now - self._began >= self._longest_s else None


def cpu_time(process_ids: Iterable[int]) -> float:
    """Return the CPU time of processes of this machine, in seconds."""
    return sum(map(_cpu_time, process_ids))


def _cpu_time(process_id: int) -> float:
    """Return a process's CPU time; 0 for an ended process, whose end is noticed elsewhere."""
    try:
        times = psutil.Process(process_id).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
