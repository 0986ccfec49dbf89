"""Answers of cores together: results of calls, and their status."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.engine.messages import BrokerStatus
from penstock.engine.processes.supervisor import Call, EngineSupervisor
from penstock.engine.statistics.metric_totals import StepTotals
from penstock.scheduler.outputs import NO_STATS, summed_stats


def status_of(engines: Sequence[EngineSupervisor], num_engines: int) -> BrokerStatus:
    """State of the cores of these supervisors. num_engines: all cores, those included that have no supervisor yet."""
    steps = StepTotals()
    for engine in engines:
        steps.add(engine.steps)
    return BrokerStatus(
        stats=summed_stats([NO_STATS, *(engine.stats for engine in engines)]),
        num_engines=num_engines,
        num_recovering=num_engines - sum(engine.is_running for engine in engines),
        num_recovering_workers=sum(engine.is_recovering for engine in engines),
        num_restarts=sum(engine.num_restarts for engine in engines),
        num_worker_restarts=sum(engine.num_worker_restarts for engine in engines),
        stalled_s=max((engine.stalled_s for engine in engines), default=0.0),
        num_requests=sum(len(engine.requests) for engine in engines),
        steps=steps,
    )


def results_of(calls: Iterable[Call]) -> list[Any]:
    """Results of the workers of all cores."""
    return [answer for call in calls for answer in result_of(call)]


def result_of(call: Call) -> Any:
    """Result of a call that is over; raises its error."""
    if call.error is not None:
        raise call.error
    assert call.answer is not None, "a call without an error has its answer"
    return pickle.loads(call.answer.result)
