"""What counts as the silence of a core."""

from __future__ import annotations

# Of one wait for a core. Whoever listens comes back from it to see to others.
LONGEST_WAIT_S = 0.25


class Heartbeat:
    """For how long a core that owes something has said nothing, while somebody listened.

    Time in which nobody did, such as while this process was stopped or busy, is not the core's silence: what it has
    said then is still to be read.
    """

    __slots__ = ("_heard_nothing_s", "limit_s")

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._heard_nothing_s = 0.0

    @property
    def lasts_s(self) -> float:
        return self._heard_nothing_s

    def end(self) -> None:
        """It has said something, or owes nothing."""
        self._heard_nothing_s = 0.0

    def go_on(self, waited_s: float) -> bool:
        """It has said nothing during one more wait, of `LONGEST_WAIT_S` at most. Returns whether that is too long."""
        self._heard_nothing_s += min(waited_s, LONGEST_WAIT_S)
        return self._heard_nothing_s > self.limit_s
