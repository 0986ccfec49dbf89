"""Metrics of the launcher: restarts of processes, and the steps of all cores of all brokers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import msgspec

from penstock.engine.messages import BrokerStatus
from penstock.engine.statistics.metric_totals import StepTotals
from penstock.server.metrics.folder import SharedFile

# Shortest interval between two writes that follow from heartbeats.
_INTERVAL_S = 1.0
LAUNCHER = "launcher"


class LauncherTotals(msgspec.Struct):
    """Counters that outlive every broker and front end.

    started_at: start of the server, in Unix seconds. num_restarts: by process: "broker", "front-end", "core", "workers"
    (of a core, all together).
    """

    started_at: float
    num_restarts: dict[str, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys(("broker", "front-end", "core", "workers"), 0)
    )
    steps: StepTotals = msgspec.field(default_factory=StepTotals)


class LauncherMetrics:
    """Counts restarts and steps, and shares them with the front ends. Any thread may call it.

    num_front_ends: front ends that the server has. folder: see `SharedFile`.
    """

    def __init__(self, folder: Path, num_front_ends: int) -> None:
        self._file = SharedFile(folder, LAUNCHER)
        self._num_wanted = {"broker": 1, "front-end": num_front_ends}
        self._num_started: Counter[str] = Counter()
        # Of brokers that are gone; and the last heartbeat of the current one.
        self._earlier = LauncherTotals(time.time())
        self._status: BrokerStatus | None = None
        self._written_at = 0.0
        self._lock = threading.Lock()
        self._write()

    def note_start(self, role: str) -> None:
        """Note that a process of this role, "broker" or "front-end", is started; before its first heartbeat."""
        with self._lock:
            self._num_started[role] += 1
            if role == "broker":
                self._earlier, self._status = self._totals(), None
            self._write()

    def note_status(self, status: BrokerStatus) -> None:
        """Note a heartbeat of the broker."""
        with self._lock:
            self._status = status
            if time.monotonic() - self._written_at >= _INTERVAL_S:
                self._write()

    def _totals(self) -> LauncherTotals:
        totals = LauncherTotals(self._earlier.started_at)
        for role, number in self._num_wanted.items():
            totals.num_restarts[role] = max(0, self._num_started[role] - number)
        for role in ("core", "workers"):
            totals.num_restarts[role] = self._earlier.num_restarts[role]
        totals.steps.add(self._earlier.steps)
        if self._status is not None:
            totals.num_restarts["core"] += self._status.num_restarts
            totals.num_restarts["workers"] += self._status.num_worker_restarts
            totals.steps.add(self._status.steps)
        return totals

    def _write(self) -> None:
        self._written_at = time.monotonic()
        self._file.write(self._totals())
