"""Heartbeats of a broker."""

from __future__ import annotations

from penstock.engine.messages import BrokerStatus
from penstock.engine.statistics.metric_totals import StepTotals
from penstock.scheduler.outputs import SchedulerStats

BUSY = BrokerStatus(
    stats=SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, num_blocks=10, num_used_blocks=4),
    num_engines=2,
    num_recovering=1,
    num_restarts=1,
    num_worker_restarts=0,
    stalled_s=0.5,
    num_requests=7,
    num_queued_requests=1,
    num_queued_tokens=90,
    num_refused=0,
    steps=StepTotals(),
)
