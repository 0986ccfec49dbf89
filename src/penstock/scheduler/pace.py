"""Pace of work beside steps."""

from __future__ import annotations

# Share of a core's time that such work takes from the steps, each of which waits for its slowest thread; and seconds of
# it at once.
_SHARE, _MOST_AT_ONCE_S = 0.015, 0.005


class Pace:
    """Pace of jobs beside steps, such as saves of blocks: CPU time that they may take, as it comes and is used.

    Kernels that wait long for a thread, since a job takes its core, go on with fewer threads for a while. So jobs are
    few at once, at most `most`.
    """

    def __init__(self, now: float, most: int) -> None:
        self._now, self._credit_s, self._most = now, 0.0, most
        # CPU time of a job; a guess before the first one.
        self._cost_s = _MOST_AT_ONCE_S

    def num_jobs(self, now: float) -> int:
        """Number of jobs that may begin now. now: seconds of `time.monotonic`."""
        most_s = max(_MOST_AT_ONCE_S, self._cost_s)
        self._credit_s = min(most_s, self._credit_s + (now - self._now) * _SHARE)
        self._now = now
        return min(self._most, max(0, int(self._credit_s / self._cost_s))) if self._cost_s else self._most

    def begin(self) -> float:
        """Note that a job begins; return the CPU time that it is expected to take."""
        self._credit_s -= self._cost_s
        return self._cost_s

    def end(self, expected_s: float, cost_s: float) -> None:
        """Note the CPU time that a job has taken."""
        self._credit_s += expected_s - cost_s
        self._cost_s += (cost_s - self._cost_s) / 2 if cost_s else -self._cost_s
