"""Tokens of experts, as a server reads them from workers whose answers are given."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from penstock.engine.processes.broker_connection import BrokerState
from penstock.server.metrics.expert_tokens import ExpertTokens
from penstock.server.processes.health import Health
from support.broker_statuses import BUSY

READY = msgspec.structs.replace(BUSY, num_recovering=0)


class Workers:
    """Workers with these tokens by layer. error: raised instead of an answer. num_calls: so far."""

    def __init__(self, *answers: dict[int, list[int]]) -> None:
        self.answers = answers
        self.error: Exception | None = None
        self.num_calls = 0

    async def collective_rpc(self, method: str, timeout: float | None = None) -> list[Any]:
        assert method == "get_expert_stats"
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        return list(self.answers)


def expert_tokens(workers: Workers, broker: BrokerState | None = None) -> ExpertTokens:
    """Tokens of these workers. broker: its state; None is one whose cores all run."""
    if broker is None:
        broker = BrokerState()
        broker.note(READY)
    return ExpertTokens(cast(Any, workers), Health(broker, step_limit_s=60.0, silence_limit_s=60.0))
