"""Tokens of each expert, which the workers count and a scrape reads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.statistics.expert_load import imbalance, sum_of_workers
from penstock.engine.statistics.metrics import PREFIX, Counter, Gauge, Metric
from penstock.errors import PenstockError
from penstock.server.processes.health import Health

logger = logging.getLogger(__name__)
_LONGEST_WAIT_S = 5.0
# Shortest interval between two calls of the workers, however often clients scrape.
_INTERVAL_S = 0.25


class NoExpertTokens:
    """Tokens of experts in a server that does not count them."""

    async def read(self) -> None:
        """Ask the workers, which answer between two steps."""

    def metrics(self, labels: dict[str, str]) -> Iterator[Metric]:
        """Metrics of each layer, as they were read last."""
        return iter(())


class ExpertTokens(NoExpertTokens):
    """Tokens of experts in a server with the option `expert_stats`.

    They keep their last values while a core is being replaced, for which a call would wait.
    """

    def __init__(self, engine: AsyncEngine, health: Health) -> None:
        self._engine, self._health = engine, health
        self._tokens: dict[int, list[int]] = {}
        self._is_reading = asyncio.Lock()
        self._read_at = float("-inf")

    async def read(self) -> None:
        async with self._is_reading:
            if time.monotonic() - self._read_at < _INTERVAL_S or not self._all_cores_run():
                return
            try:
                async with asyncio.timeout(_LONGEST_WAIT_S):
                    answers = await self._engine.collective_rpc("get_expert_stats", timeout=_LONGEST_WAIT_S)
            except (PenstockError, TimeoutError) as error:
                logger.debug("The tokens of experts were not read: %s", error)
            else:
                self._tokens = sum_of_workers(answers)
            self._read_at = time.monotonic()

    def metrics(self, labels: dict[str, str]) -> Iterator[Metric]:
        for layer, tokens in self._tokens.items():
            of_layer = {**labels, "layer": str(layer)}
            yield Counter(f"{PREFIX}expert_tokens", of_layer, sum(tokens))
            yield Gauge(f"{PREFIX}expert_imbalance", of_layer, imbalance(tokens))

    def _all_cores_run(self) -> bool:
        status = self._health.status
        if status is None or self._health.why_not_ready() is not None:
            return False
        return status.num_recovering == status.num_recovering_workers == 0
