"""How often, and after how long, what failed is started again."""

from __future__ import annotations

import math
import time

_FIRST_S, _LONGEST_S = 0.05, 5.0
# What has stood by for so long, with nothing to do, was as good as what brought results.
GOOD_AFTER_S = 30.0


def pause_before_restart(num_failures: int) -> float:
    """Seconds after so many failures in a row: none at first, then 0.2 s, 0.4 s and so on."""
    return 0.0 if num_failures <= 1 else min(_LONGEST_S, _FIRST_S * 2.0**num_failures)


class FailuresInARow:
    """Failures without progress in between: a result, or a while of standing by.

    number: of them. first: the first one.
    """

    __slots__ = ("_running_since", "first", "number")

    def __init__(self) -> None:
        self.number = 0
        self.first: Exception | None = None
        self._running_since = math.inf

    def note_start(self) -> None:
        """What may fail has started."""
        self._running_since = time.monotonic()

    def note_result(self) -> None:
        self.number = 0

    def note_idle(self) -> None:
        """Nothing has been asked of it until now, or until it failed now."""
        if self.number and time.monotonic() - self._running_since > GOOD_AFTER_S:
            self.number = 0

    def note(self, error: Exception) -> None:
        """It has failed, or could not be started again."""
        self._running_since = math.inf
        self.number += 1
        if self.number == 1:
            self.first = error
