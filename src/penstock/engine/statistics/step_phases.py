"""Time of an engine core's steps by phase."""

from __future__ import annotations

import time
from enum import StrEnum

from penstock.observability.spans import SpanLog

_TRACK = "phases"


class StepPhase(StrEnum):
    """Phase of a core's step.

    SCHEDULE: the scheduler decides what runs. EXECUTE: inputs are prepared and the forward pass is launched; workers in
    the core's process on the CPU have run it then. GRAMMAR: the bitmask of constrained requests. SAMPLE: sampling is
    launched. WAIT: for the results of a step in flight. UPDATE: the scheduler takes its results. SEND: the outputs are
    sent.
    """

    SCHEDULE = "schedule"
    EXECUTE = "execute"
    GRAMMAR = "grammar"
    SAMPLE = "sample"
    WAIT = "wait"
    UPDATE = "update"
    SEND = "send"


class PhaseTimer:
    """Timer of the phases of one step after the other. spans: receives them too; None for none."""

    __slots__ = ("_last", "_seconds", "_spans")

    def __init__(self, spans: SpanLog | None = None) -> None:
        self._spans = spans
        self._seconds: dict[str, float] = {}
        self._last = 0.0

    def begin(self) -> None:
        """Begin a phase now; time since the last one belongs to none."""
        self._last = time.perf_counter()

    def end(self, phase: StepPhase) -> None:
        """Add the time since the last phase to this one. The next phase begins."""
        now = time.perf_counter()
        self._seconds[phase.value] = self._seconds.get(phase.value, 0.0) + now - self._last
        if self._spans is not None:
            self._spans.add(phase.value, self._last, now, _TRACK)
        self._last = now

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken
