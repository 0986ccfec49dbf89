"""Metrics of a whole server, as any of its front ends gives them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.live.live_view import LiveSample
from penstock.engine.messages import BrokerStatus
from penstock.engine.statistics.metric_totals import RequestTotals
from penstock.engine.statistics.metrics import (
    PREFIX,
    Counter,
    Gauge,
    Metric,
    histogram_of,
    metrics_of,
    metrics_of_schedulers,
)
from penstock.server.metrics.expert_tokens import NoExpertTokens
from penstock.server.metrics.folder import FRONT_END, SharedFile, shared_files
from penstock.server.metrics.history import read_history
from penstock.server.metrics.http_requests import HttpCount, HttpCounts
from penstock.server.metrics.launcher_metrics import LAUNCHER, LauncherTotals
from penstock.server.processes.health import Health
from penstock.version import __version__

_INTERVAL_S = 1.0


class FrontEndTotals(msgspec.Struct):
    """Counters and histograms of one front end, or of several together."""

    requests: RequestTotals
    http: list[HttpCount]


class FrontEndMetrics:
    """Shares the counts of this front end, and adds up those of all, of ended ones too.

    Counters never decrease: a front end writes its counts before it shows them, so the loss of its process loses none
    that a scrape has shown.

    number: of this front end among all ever started. folder: see `SharedFile`. max_num_seqs: of each core.
    block_size: of the KV cache. experts: tokens of the model's experts; None for none.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        health: Health,
        http: HttpCounts,
        folder: Path,
        *,
        number: int,
        model_name: str,
        max_num_seqs: int,
        block_size: int,
        experts: NoExpertTokens | None = None,
    ) -> None:
        self._labels = {"model_name": model_name}
        self._engine = engine
        self._health = health
        self._http = http
        self._folder = folder
        self._file = SharedFile(folder, f"{FRONT_END}{number}")
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._experts = experts or NoExpertTokens()

    async def read_workers(self) -> None:
        """Read what only the workers count, for `collect`; waits for the steps in flight, if there is anything."""
        await self._experts.read()

    async def keep_written(self) -> None:
        """Write the counts every second, until the task is cancelled."""
        while True:
            self.write()
            await asyncio.sleep(_INTERVAL_S)

    def write(self) -> FrontEndTotals:
        """Write the counts of this front end, and return them."""
        totals = FrontEndTotals(self._engine.request_totals(), self._http.counts())
        self._file.write(totals)
        return totals

    def totals(self) -> FrontEndTotals:
        """Write the counts of this front end, and return those of all together."""
        own = self.write()
        requests, http = own.requests, HttpCounts()
        http.add(own.http)
        for file in shared_files(self._folder, FRONT_END):
            other = file.read(FrontEndTotals) if file.path != self._file.path else None
            if other is not None:
                requests.add(other.requests)
                http.add(other.http)
        return FrontEndTotals(requests, http.counts())

    def launcher_totals(self) -> LauncherTotals | None:
        """Counts of the launcher; None before it has written any."""
        return SharedFile(self._folder, LAUNCHER).read(LauncherTotals)

    def history(self) -> list[LiveSample]:
        """Samples of the server in the last two minutes."""
        return read_history(self._folder)

    def collect(self) -> Iterator[Metric]:
        """All metrics of the server, those of the workers as they were read last."""
        totals = self.totals()
        yield Gauge(f"{PREFIX}build", {**self._labels, "version": __version__}, 1.0)
        yield from self._gauges()
        yield from metrics_of(totals.requests, self._labels)
        for one in totals.http:
            labels = {**self._labels, "handler": one.handler, "method": one.method, "status": str(one.status)}
            yield Counter(f"{PREFIX}http_requests", labels, one.count)
        yield from self._experts.metrics(self._labels)
        launcher = self.launcher_totals()
        if launcher is not None:
            yield from self._launcher_metrics(launcher)

    def _gauges(self) -> Iterator[Metric]:
        health = self._health
        values: dict[str, float] = {
            "kv_cache_block_size": self._block_size,
            "broker_heartbeat_age_seconds": health.silent_s,
            "alive": health.why_dead() is None,
            "ready": health.why_not_ready() is None,
        }
        status = health.status
        if status is not None:
            yield from metrics_of_schedulers(status.stats, self._labels)
            values |= self._broker_gauges(status)
        for name, value in values.items():
            yield Gauge(PREFIX + name, self._labels, float(value))

    def _broker_gauges(self, status: BrokerStatus) -> dict[str, float]:
        return {
            "num_requests": status.num_requests,
            "num_queued_requests": status.num_queued_requests,
            "num_queued_tokens": status.num_queued_tokens,
            "max_num_requests_running": status.num_engines * self._max_num_seqs,
            "num_kv_cache_blocks": status.stats.num_blocks,
            "num_cores": status.num_engines,
            "num_cores_recovering": status.num_recovering,
            "core_stalled_seconds": status.stalled_s,
        }

    def _launcher_metrics(self, totals: LauncherTotals) -> Iterable[Metric]:
        yield Gauge(f"{PREFIX}start_time_seconds", self._labels, totals.started_at)
        for process, number in totals.num_restarts.items():
            yield Counter(f"{PREFIX}process_restarts", {**self._labels, "process": process}, number)
        yield histogram_of("step_duration_seconds", totals.steps.seconds, self._labels)
        for phase, observations in totals.steps.phases.items():
            yield histogram_of("step_phase_seconds", observations, {**self._labels, "phase": phase})
        yield histogram_of("iteration_tokens_total", totals.steps.tokens, self._labels)
