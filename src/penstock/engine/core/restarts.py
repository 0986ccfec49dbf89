"""Restart policy of workers and cores: exponential backoff, and quarantine of the requests that make them fail."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection
from typing import Protocol

_FIRST_S, _LONGEST_S = 0.05, 5.0
# Idle time after a start that resets the failure count, as a result does.
GOOD_AFTER_S = 30.0
# Reason for which a suspect waits during the trial of another one.
_TURN = "its turn to run without other suspects"
# Consecutive failures without a result that make a request a suspect.
_MOST_FAILURES = 2
# Possibly external failures during a request's trial that convict it nevertheless.
_MOST_KILLS = 2


def restart_backoff_s(num_failures: int) -> float:
    """Seconds before the restart after so many consecutive failures: 0 at first, then 0.2 s, 0.4 s, ... up to 5 s."""
    return 0.0 if num_failures <= 1 else min(_LONGEST_S, _FIRST_S * 2.0**num_failures)


class FailureCount:
    """Consecutive failures; a result, or a while of idling, resets the count.

    number: of failures. first: error of the first one.
    """

    __slots__ = ("_running_since", "first", "number")

    def __init__(self) -> None:
        self.number = 0
        self.first: Exception | None = None
        self._running_since = math.inf

    def note_start(self) -> None:
        """Note that the process or the workers have started."""
        self._running_since = time.monotonic()

    def note_result(self) -> None:
        self.number = 0

    def note_idle(self) -> None:
        """Reset the count if they have been idle for `GOOD_AFTER_S` since their start."""
        if self.number and time.monotonic() - self._running_since > GOOD_AFTER_S:
            self.number = 0

    def note(self, error: Exception) -> None:
        """Count a failure of them, or of their restart."""
        self._running_since = math.inf
        self.number += 1
        if self.number == 1:
            self.first = error


class RequestHolder(Protocol):
    """Owner of the requests (the scheduler, or an engine's supervisor), as the quarantine sees it."""

    def wait_for(self, req_id: str, reason: str) -> None: ...

    def ready(self, req_id: str, reason: str) -> None: ...

    def holds(self, req_id: str) -> bool: ...


class Quarantine:
    """Runs suspects, the requests that ran at two consecutive failures, one at a time until each has a result.

    A suspect that runs alone when workers fail again is the culprit. A failure by a signal or a timeout may have an
    external cause, or come from the request (its memory, an endless loop), so it takes two of them. Other requests run
    beside the suspect on trial.
    """

    def __init__(self, scheduler: RequestHolder) -> None:
        self._scheduler = scheduler
        self._num_failures: Counter[str] = Counter()
        # In the order of their trials; the first one is on trial.
        self._suspects: list[str] = []
        # Possibly external failures in the current trial.
        self._num_kills = 0

    def note_failure(self, req_ids: Collection[str], *, is_from_outside: bool = False) -> str | None:
        """Count a failed step of these requests, which all wait again. Returns the culprit, once identified.

        is_from_outside: whether the failure may have an external cause.
        """
        self._num_failures.update(req_ids)
        if self._suspects and self._suspects[0] in req_ids:
            self._num_kills += is_from_outside
            if not is_from_outside or self._num_kills >= _MOST_KILLS:
                culprit = self._suspects[0]
                self._end_trial()
                return culprit
        new = [
            req_id
            for req_id in req_ids
            if self._num_failures[req_id] >= _MOST_FAILURES and req_id not in self._suspects
        ]
        for req_id in new if self._suspects else new[1:]:
            self._scheduler.wait_for(req_id, _TURN)
        self._suspects += new
        return None

    @property
    def has_suspicions(self) -> bool:
        """Whether any request ran at a failure and had no result since."""
        return bool(self._num_failures)

    def note_results(self, req_ids: Collection[str]) -> None:
        """Clear requests that had results, or have ended."""
        if not self._num_failures:
            return
        for req_id in req_ids:
            del self._num_failures[req_id]
        # A suspect may also have ended without a result.
        while self._suspects and (self._suspects[0] in req_ids or not self._scheduler.holds(self._suspects[0])):
            self._end_trial()

    def _end_trial(self) -> None:
        self._num_kills = 0
        del self._num_failures[self._suspects.pop(0)]
        if self._suspects:
            self._scheduler.ready(self._suspects[0], _TURN)
