"""Liveness and readiness follow from the broker's heartbeats."""

from __future__ import annotations

import math
import time

import msgspec
import pytest

from penstock.engine.messages import BrokerStatus
from penstock.engine.processes.broker_connection import BrokerState
from penstock.scheduler.outputs import CoreState
from penstock.server.processes.health import Health
from support.broker_statuses import BUSY

WELL = msgspec.structs.replace(BUSY, num_recovering=0, stalled_s=0.0)


def judged(status: BrokerStatus | None, silent_s: float = 0.0, lost_s: float = math.inf) -> Health:
    broker = BrokerState()
    broker.status = status
    broker.received_at -= silent_s
    broker.lost_at = time.monotonic() - lost_s
    return Health(broker, step_limit_s=300.0, silence_limit_s=30.0)


def changed(**values: float) -> BrokerStatus:
    return msgspec.structs.replace(WELL, **values)


def resting(name: str, *, is_ready: bool) -> BrokerStatus:
    return msgspec.structs.replace(WELL, stats=msgspec.structs.replace(WELL.stats, state=CoreState(name, is_ready)))


@pytest.mark.parametrize(
    ("status", "silent_s", "dead", "not_ready"),
    [
        (WELL, 0.0, None, None),
        (None, 0.0, None, "being started"),
        (changed(num_recovering=1), 0.0, None, None),
        (changed(num_recovering=2), 0.0, None, "being replaced"),
        (WELL, 5.0, None, "being started"),
        (
            resting("sleeping (level 1: weights)", is_ready=False),
            0.0,
            None,
            "does not run: sleeping (level 1: weights)",
        ),
        (resting("sleeping (idle, level 1: weights)", is_ready=True), 0.0, None, None),
        (WELL, 31.0, "no heartbeat", "no heartbeat"),
        # A wedge: the core answers, and computes nothing for longer than any step may take.
        (changed(stalled_s=299.0), 0.0, None, None),
        (changed(stalled_s=301.0), 0.0, "no token", "no token"),
    ],
)
def test_health_and_readiness(
    status: BrokerStatus | None, silent_s: float, dead: str | None, not_ready: str | None
) -> None:
    health = judged(status, silent_s)
    for found, expected in ((health.why_dead(), dead), (health.why_not_ready(), not_ready)):
        assert (found is None) == (expected is None), found
        assert expected is None or expected in (found or "")


def test_a_draining_server_lives_and_is_not_ready() -> None:
    health = judged(WELL)
    health.is_draining = True
    assert health.why_dead() is None
    assert "shutting down" in (health.why_not_ready() or "")


def test_a_broker_that_is_being_replaced_after_a_long_silence_is_no_dead_server() -> None:
    """An orchestrator would kill the server in the middle of its repair."""
    replacing = judged(WELL, silent_s=33.0, lost_s=2.0)
    assert replacing.why_dead() is None
    assert replacing.why_not_ready() == "the broker is being started"
    assert judged(WELL, silent_s=70.0, lost_s=31.0).why_dead() is not None
