"""Which of the requests that ran when workers, or a core, failed made them fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Protocol

# What a suspect waits for while another one is tried.
_TURN = "its turn to run without other suspects"
# Failures without a result in between that make a request a suspect.
_MOST_FAILURES = 2
# Ends of workers in a request's trial that somebody else may have brought about, and that convict it nevertheless.
_MOST_KILLS = 2


class Waiting(Protocol):
    """Whoever keeps the requests, such as the scheduler; its methods of these names say what they do."""

    def wait_for(self, req_id: str, reason: str) -> None: ...

    def ready(self, req_id: str, reason: str) -> None: ...

    def holds(self, req_id: str) -> bool: ...


class Quarantine:
    """Lets requests that were there at two failures in a row run one at a time, until each has brought a result.

    One that is there when workers fail again made them fail, unless they were killed or hang: that may have come from
    outside, or from what the request does (its memory, an endless loop), so it takes two of them. Others go on beside
    the one that is tried.
    """

    def __init__(self, scheduler: Waiting) -> None:
        self._scheduler = scheduler
        self._num_failures: Counter[str] = Counter()
        # In the order of their trials; the first one's is now.
        self._suspects: list[str] = []
        # In the present trial.
        self._num_kills = 0

    def note_failure(self, req_ids: Collection[str], *, is_from_outside: bool = False) -> str | None:
        """Steps of these requests failed, which all wait again. Returns the one that is to blame, if that is known.

        is_from_outside: whether somebody else may have made them fail.
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

    def note_results(self, req_ids: Collection[str]) -> None:
        """These requests brought results, so whatever failed before, it was not they; or they have ended."""
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
