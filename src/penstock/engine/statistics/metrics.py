"""Metrics of an engine: counters, gauges and histograms under vLLM's names, which begin with `penstock:` here."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TypeAlias

import msgspec

from penstock.contract.feature import without_label
from penstock.engine.output.outputs import RequestMetrics
from penstock.engine.statistics.metric_totals import Observations, RequestTotals
from penstock.scheduler.acceptance import SpecDecodeMetrics
from penstock.scheduler.outputs import FinishReason, SchedulerStats

logger = logging.getLogger(__name__)
_LOG_INTERVAL_S = 10.0
PREFIX = "penstock:"


class Counter(msgspec.Struct, frozen=True):
    """Monotonically increasing value. labels: such as the model's name."""

    name: str
    labels: dict[str, str]
    value: int


class Vector(msgspec.Struct, frozen=True):
    """Ordered counters, such as one per draft position."""

    name: str
    labels: dict[str, str]
    values: list[int]


class Gauge(msgspec.Struct, frozen=True):
    """Current value."""

    name: str
    labels: dict[str, str]
    value: float


class Histogram(msgspec.Struct, frozen=True):
    """Observed values. buckets: number of values up to each bound, by the bound as text; "+Inf" has all."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]


Metric: TypeAlias = Counter | Vector | Gauge | Histogram


class EngineMetrics:
    """Metrics of the requests of one engine; the counts of running requests are added by `totals`.

    has_prefix_cache: whether prompts are looked up in a prefix cache. media_counts: gives the numbers of media items
    that were looked up among processed ones, and found; the engine sets it.
    """

    def __init__(self, model_name: str, *, has_prefix_cache: bool) -> None:
        self._labels = {"model_name": model_name}
        self._has_prefix_cache = has_prefix_cache
        self.media_counts: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._noted = RequestTotals()
        self.note_first_token = self._noted.note_first_token
        self.note_later_tokens = self._noted.note_later_tokens
        self.note_refusal = self._noted.note_refusal

    def note_end(
        self, reason: FinishReason, num_prompt_tokens: int, metrics: RequestMetrics, max_tokens: int | None = None
    ) -> None:
        """Count a request that has ended. max_tokens: its parameter."""
        self._noted.note_counts(num_prompt_tokens, metrics, has_prefix_cache=self._has_prefix_cache)
        self._noted.note_end(reason, num_prompt_tokens, metrics, max_tokens)

    def totals(self, running: Iterable[tuple[int, RequestMetrics]]) -> RequestTotals:
        """Copy of the counts of all requests. running: (prompt tokens, metrics so far) of each unfinished request."""
        totals = RequestTotals()
        totals.add(self._noted)
        totals.num_media_queries, totals.num_media_hits = self.media_counts()
        for num_prompt_tokens, metrics in running:
            totals.note_counts(num_prompt_tokens, metrics, has_prefix_cache=self._has_prefix_cache)
        return totals

    def read(self, stats: SchedulerStats, running: Iterable[tuple[int, RequestMetrics]]) -> list[Metric]:
        """All metrics; see `totals`."""
        return [*metrics_of_schedulers(stats, self._labels), *metrics_of(self.totals(running), self._labels)]


def metrics_of_schedulers(stats: SchedulerStats, labels: dict[str, str]) -> Iterator[Metric]:
    """Gauges and counters of the schedulers' counts."""
    values = {
        "num_requests_running": stats.num_running_reqs,
        "num_requests_waiting": stats.num_waiting_reqs,
        "kv_cache_usage_perc": stats.kv_cache_usage,
        "num_states": stats.num_states,
        "num_state_snapshots": stats.num_snapshots,
        "encoder_cache_usage_perc": stats.encoder_cache_usage,
        "num_encoder_cache_tokens": stats.num_encoder_tokens,
        "weight_version": stats.weight_version,
    }
    for name, value in {**values, **stats.gauges}.items():
        alone, label = without_label(name)
        yield Gauge(PREFIX + alone, {**labels, **label}, float(value))
    counts = {
        "state_snapshots_taken": stats.num_snapshots_taken,
        "state_snapshots_evicted": stats.num_snapshots_evicted,
        "encoder_cache_queries": stats.num_encoder_queries,
        "encoder_cache_hits": stats.num_encoder_hits,
        **stats.counters,
    }
    for name, count in counts.items():
        alone, label = without_label(name)
        yield Counter(PREFIX + alone, {**labels, **label}, count)


def metrics_of(totals: RequestTotals, labels: dict[str, str]) -> Iterator[Metric]:
    """Counters and histograms of requests."""
    drafts = totals.drafts
    values = {
        "num_preemptions": totals.num_preemptions,
        "prompt_tokens": totals.num_prompt_tokens,
        "generation_tokens": totals.num_generated_tokens,
        "prefix_cache_queries": totals.num_queried_tokens,
        "prefix_cache_hits": totals.num_cached_tokens,
        "mm_cache_queries": totals.num_media_queries,
        "mm_cache_hits": totals.num_media_hits,
        "spec_decode_num_drafts": drafts.num_drafts,
        "spec_decode_num_draft_tokens": drafts.num_draft_tokens,
        "spec_decode_num_accepted_tokens": drafts.num_accepted_tokens,
    }
    for name, value in values.items():
        yield Counter(PREFIX + name, labels, value)
    name = PREFIX + "spec_decode_num_accepted_tokens_per_pos"
    yield Vector(name, labels, list(drafts.num_accepted_tokens_per_pos))
    for reason, count in totals.num_ended.items():
        yield Counter(PREFIX + "request_success", {**labels, "finished_reason": reason}, count)
    for reason, count in totals.num_refused.items():
        yield Counter(PREFIX + "requests_refused", {**labels, "reason": reason}, count)
    for name, observations in totals.histograms.items():
        yield histogram_of(name, observations, labels)


def histogram_of(name: str, observations: Observations, labels: dict[str, str]) -> Histogram:
    """Histogram with cumulative buckets."""
    numbers = list(accumulate(observations.counts))
    bounds = [*map(str, observations.bounds), "+Inf"]
    return Histogram(PREFIX + name, labels, numbers[-1], observations.sum, dict(zip(bounds, numbers, strict=True)))


class SpecDecodeLog:
    """Logs the acceptance of draft tokens: periodically since the last log line, and in total at the end."""

    def __init__(self, metrics: SpecDecodeMetrics) -> None:
        self._metrics = metrics
        self._logged = copy.deepcopy(metrics)
        self._last_time = time.monotonic()

    def note_step(self) -> None:
        """Note a step with draft tokens."""
        now = time.monotonic()
        if now - self._last_time >= _LOG_INTERVAL_S:
            logger.info("Speculation: %s", self._metrics.since(self._logged).describe())
            self._logged, self._last_time = copy.deepcopy(self._metrics), now

    def close(self) -> None:
        if self._metrics.num_drafts:
            logger.info("Speculation in all: %s", self._metrics.describe())
