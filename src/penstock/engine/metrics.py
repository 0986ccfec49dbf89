"""Metrics of an engine: counters, gauges and histograms under vLLM's names, which begin with `penstock:` here."""

from __future__ import annotations

import copy
import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TypeAlias

import msgspec

from penstock.engine.outputs import RequestMetrics
from penstock.scheduler.acceptance import SpecDecodeMetrics
from penstock.scheduler.outputs import FinishReason, SchedulerStats

logger = logging.getLogger(__name__)
_LOG_INTERVAL_S = 10.0
_PREFIX = "penstock:"
# Upper bounds of the histograms' buckets, in seconds.
_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
# Names of the histograms, with the property of a request's metrics that goes into each.
_HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token_s",
    "request_time_per_output_token_seconds": "time_per_output_token_s",
    "request_queue_time_seconds": "time_in_queue_s",
    "e2e_request_latency_seconds": "latency_s",
}


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


class _Observations:
    """Bucket counts and sum of one histogram."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(_BOUNDS, value)] += 1
        self.sum += value

    def as_metric(self, name: str, labels: dict[str, str]) -> Histogram:
        totals = list(accumulate(self.counts))
        bounds = [*map(str, _BOUNDS), "+Inf"]
        return Histogram(name, labels, totals[-1], self.sum, dict(zip(bounds, totals, strict=True)))


class _Totals:
    """Sums over requests."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.num_preemptions = 0
        self.drafts = SpecDecodeMetrics()

    def add(self, num_prompt_tokens: int, metrics: RequestMetrics) -> None:
        # A request that was never scheduled has computed no prompt tokens.
        if metrics.first_scheduled_time is not None:
            self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += metrics.num_cached_tokens
        self.num_generated_tokens += metrics.num_generated_tokens
        self.num_preemptions += metrics.num_preemptions
        self.drafts.add(metrics.spec_decode_metrics)

    def __add__(self, other: _Totals) -> _Totals:
        both = _Totals()
        for one in (self, other):
            both.num_prompt_tokens += one.num_prompt_tokens
            both.num_cached_tokens += one.num_cached_tokens
            both.num_generated_tokens += one.num_generated_tokens
            both.num_preemptions += one.num_preemptions
            both.drafts.add(one.drafts)
        return both


class EngineMetrics:
    """Metrics of one engine, counted when a request ends; running requests are added by `read`.

    has_prefix_cache: whether prompts are looked up in a prefix cache.
    """

    def __init__(self, model_name: str, *, has_prefix_cache: bool) -> None:
        self._labels = {"model_name": model_name}
        self._has_prefix_cache = has_prefix_cache
        self._ended = _Totals()
        self._num_ended = dict.fromkeys(FinishReason, 0)
        self._histograms = {name: _Observations() for name in _HISTOGRAMS}

    def note_end(self, reason: FinishReason, num_prompt_tokens: int, metrics: RequestMetrics) -> None:
        """Count a request that has ended."""
        self._num_ended[reason] += 1
        self._ended.add(num_prompt_tokens, metrics)
        for name, field in _HISTOGRAMS.items():
            if (value := getattr(metrics, field)) is not None:
                self._histograms[name].add(value)

    def read(self, stats: SchedulerStats, running: Iterable[tuple[int, RequestMetrics]]) -> list[Metric]:
        """All metrics. running: (prompt tokens, metrics so far) of each unfinished request."""
        now = _Totals()
        for num_prompt_tokens, metrics in running:
            now.add(num_prompt_tokens, metrics)
        return [
            *self._gauges(stats),
            *self._counters(self._ended + now),
            *(seen.as_metric(_PREFIX + name, self._labels) for name, seen in self._histograms.items()),
        ]

    def _gauges(self, stats: SchedulerStats) -> Iterator[Gauge]:
        values = {
            "num_requests_running": stats.num_running_reqs,
            "num_requests_waiting": stats.num_waiting_reqs,
            "kv_cache_usage_perc": stats.num_used_blocks / max(1, stats.num_blocks),
        }
        return (Gauge(_PREFIX + name, self._labels, float(value)) for name, value in values.items())

    def _counters(self, totals: _Totals) -> Iterator[Counter | Vector]:
        drafts = totals.drafts
        values = {
            "num_preemptions": totals.num_preemptions,
            "prompt_tokens": totals.num_prompt_tokens,
            "generation_tokens": totals.num_generated_tokens,
            "prefix_cache_queries": totals.num_prompt_tokens if self._has_prefix_cache else 0,
            "prefix_cache_hits": totals.num_cached_tokens,
            "spec_decode_num_drafts": drafts.num_drafts,
            "spec_decode_num_draft_tokens": drafts.num_draft_tokens,
            "spec_decode_num_accepted_tokens": drafts.num_accepted_tokens,
        }
        for name, value in values.items():
            yield Counter(_PREFIX + name, self._labels, value)
        name = _PREFIX + "spec_decode_num_accepted_tokens_per_pos"
        yield Vector(name, self._labels, list(drafts.num_accepted_tokens_per_pos))
        for reason, count in self._num_ended.items():
            yield Counter(_PREFIX + "request_success", {**self._labels, "finished_reason": str(reason)}, count)


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
