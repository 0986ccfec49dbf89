"""Times of a core's steps by phase, and its replacements of workers."""

from __future__ import annotations

import time

import pytest

from penstock.contract import StructuredOutputsParams
from penstock.engine.statistics.step_phases import PhaseTimer, StepPhase
from support.disturbed_workers import FailingWorker
from support.engines import add, finish, greedy, make_core

WORKER = "support.disturbed_workers.FailingWorker"
OF_THE_CORE = set(StepPhase) - {StepPhase.SEND}


def test_each_phase_has_the_time_since_the_last_one() -> None:
    timer = PhaseTimer()
    time.sleep(0.02)
    timer.begin()
    for phase in (StepPhase.WAIT, StepPhase.SCHEDULE, StepPhase.WAIT):
        time.sleep(0.01)
        timer.end(phase)
    taken = timer.take()
    assert taken.keys() == {"wait", "schedule"}
    assert taken["wait"] >= 0.02
    assert taken["schedule"] >= 0.01
    assert timer.take() == {}


def test_the_phases_of_a_step_add_up_to_it() -> None:
    core = make_core("demo", async_scheduling=False)
    add(core, "r", [5, 6], greedy(8, structured_outputs=StructuredOutputsParams(regex="[a-z]*")))
    # The request waits for its grammar first.
    while not core.scheduler.stats.num_computed_tokens:
        core.step()
    core.phases.take()
    begin = time.perf_counter()
    core.step()
    step_s, phases = time.perf_counter() - begin, core.phases.take()
    core.close()
    assert phases.keys() == OF_THE_CORE
    assert 0.5 * step_s < sum(phases.values()) <= step_s
    assert max(phases, key=phases.__getitem__) in (StepPhase.EXECUTE, StepPhase.GRAMMAR, StepPhase.SAMPLE)


def test_replacements_of_the_workers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingWorker, "fails_at", {("execute", 2), ("sample", 5)}, raising=False)
    core = make_core("demo", worker_cls=WORKER)
    add(core, "r", [5, 6], greedy(8))
    assert core.num_worker_restarts == 0
    finish(core, {})
    assert core.num_worker_restarts == 2
    core.close()
