"""Heartbeat timeout of a process."""

from __future__ import annotations

# Longest single wait for a message; timers are handled after it.
LONGEST_WAIT_S = 0.25


class Heartbeat:
    """Heartbeat timeout of a core with pending work.

    Only time in which this process waited for messages counts, not time in which it was stopped or busy: messages of
    the core may then be unread.

    limit_s: timeout. silent_s: seconds without a message so far.
    """

    __slots__ = ("limit_s", "silent_s")

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.silent_s = 0.0

    def reset(self) -> None:
        """Start over: the core has sent a message, or has no pending work."""
        self.silent_s = 0.0

    def add_silence(self, waited_s: float) -> bool:
        """Count one more wait without a message, as `LONGEST_WAIT_S` at most. Returns whether the timeout is over."""
        self.silent_s += min(waited_s, LONGEST_WAIT_S)
        return self.silent_s > self.limit_s
