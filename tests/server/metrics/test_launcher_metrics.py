"""Counters of the launcher, which outlive brokers and front ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.engine.statistics.metric_totals import StepTotals
from penstock.server.metrics import launcher_metrics
from penstock.server.metrics.folder import SharedFile
from penstock.server.metrics.launcher_metrics import LAUNCHER, LauncherMetrics, LauncherTotals
from support.broker_statuses import BUSY


@pytest.fixture(autouse=True)
def write_every_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_metrics, "_INTERVAL_S", 0.0)


def read(folder: Path) -> LauncherTotals:
    totals = SharedFile(folder, LAUNCHER).read(LauncherTotals)
    assert totals is not None
    return totals


def steps(*seconds: float) -> StepTotals:
    totals = StepTotals()
    for one in seconds:
        totals.note(one, 5, {"schedule": one / 4, "wait": one / 2})
    return totals


def test_the_first_processes_are_no_restarts(tmp_path: Path) -> None:
    metrics = LauncherMetrics(tmp_path, 2)
    for role in ("broker", "front-end", "front-end"):
        metrics.note_start(role)
    assert read(tmp_path).num_restarts == {"broker": 0, "front-end": 0, "core": 0, "workers": 0}
    for role in ("front-end", "broker", "front-end"):
        metrics.note_start(role)
    assert read(tmp_path).num_restarts == {"broker": 1, "front-end": 2, "core": 0, "workers": 0}


def test_steps_and_lost_cores_are_those_of_all_brokers(tmp_path: Path) -> None:
    metrics = LauncherMetrics(tmp_path, 1)
    metrics.note_start("broker")
    metrics.note_status(replace(BUSY, num_restarts=1, steps=steps(0.1)))
    metrics.note_status(replace(BUSY, num_restarts=2, num_worker_restarts=3, steps=steps(0.1, 0.2)))
    before = read(tmp_path)
    assert (before.num_restarts["core"], sum(before.steps.seconds.counts), before.steps.tokens.sum) == (2, 2, 10)
    metrics.note_start("broker")
    assert read(tmp_path).steps == before.steps
    metrics.note_status(replace(BUSY, num_restarts=1, num_worker_restarts=1, steps=steps(0.4)))
    after = read(tmp_path)
    assert (after.num_restarts["core"], sum(after.steps.seconds.counts)) == (3, 3)
    assert (before.num_restarts["workers"], after.num_restarts["workers"]) == (3, 4)
    assert after.steps.seconds.sum == pytest.approx(0.7)
    assert after.steps.phases["wait"].sum == pytest.approx(0.35)
    assert sum(after.steps.phases["schedule"].counts) == 3
    assert sum(after.steps.phases["grammar"].counts) == 0
    assert after.started_at == before.started_at
