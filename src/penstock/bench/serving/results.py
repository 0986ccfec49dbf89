"""Figures of a server benchmark, under the names of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.bench.serving.outcome import Outcome, Status
from penstock.errors import ConfigError

# Titles of the metrics.
METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
_GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def summarize(
    outcomes: Sequence[Outcome],
    *,
    percentile_metrics: Sequence[str],
    metric_percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """Return the figures of all requests. Times of the names with `_ms` are in milliseconds, others in seconds.

    percentile_metrics: of `METRICS`. metric_percentiles: in percent. goodput: targets in milliseconds, by metric.
    Figures without any value, such as time to first token without streaming, are None.
    """
    completed = [outcome for outcome in outcomes if outcome.status is Status.COMPLETED]
    duration = max(outcome.end for outcome in outcomes) - min(outcome.start for outcome in outcomes)
    total_input = sum(outcome.prompt_len or 0 for outcome in completed)
    total_output = sum(outcome.output_len for outcome in completed)
    count = {status: sum(outcome.status is status for outcome in outcomes) for status in Status}
    figures = {
        "duration": duration,
        "completed": len(completed),
        "failed": count[Status.FAILED] + count[Status.REJECTED],
        "rejected": count[Status.REJECTED],
        "disconnected": count[Status.DISCONNECTED],
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(completed) / duration,
        "request_goodput": _num_good(completed, goodput) / duration if goodput else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": _most_tokens_per_second(completed),
        "max_concurrent_requests": peak_concurrency(outcomes),
        "num_without_usage": sum(not outcome.is_counted for outcome in completed),
        "failures": failures(outcomes),
        "retry_after_s": max((outcome.retry_after_s or 0.0 for outcome in outcomes), default=0.0) or None,
    }
    for metric in percentile_metrics:
        figures |= _figures_of(metric, metric_values(completed, metric), metric_percentiles)
    return figures


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Return the values of each request, in the order of the requests."""
    return {
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [outcome.output_len for outcome in outcomes],
        "start_times": [outcome.start for outcome in outcomes],
        "ttfts": [outcome.ttft_s for outcome in outcomes],
        "itls": [outcome.itl_s for outcome in outcomes],
        "latencies": [outcome.latency_s for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def failures(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Count failed requests by cause, most frequent first, each with the first error."""
    found: dict[str, dict[str, Any]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.end):
        if outcome.cause:
            found.setdefault(outcome.cause, {"count": 0, "first": outcome.error})["count"] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1]["count"]))


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Most requests that were open at the same time."""
    changes = [(outcome.start, 1) for outcome in outcomes] + [(outcome.end, -1) for outcome in outcomes]
    # Ends come before begins of the same time.
    changes.sort()
    return max(np.cumsum([change for _, change in changes]).tolist(), default=0)


def parse_goodput(targets: Sequence[str]) -> dict[str, float]:
    """Parse `METRIC:MILLISECONDS` pairs. Raises ConfigError."""
    parsed = {}
    for target in targets:
        metric, _, value = target.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = -1.0
        if metric not in _GOODPUT_METRICS or not milliseconds >= 0:
            raise ConfigError(
                f"--goodput {target} is not valid. Allowed: {', '.join(_GOODPUT_METRICS)} with milliseconds, such as "
                "ttft:200 tpot:50."
            )
        parsed[metric] = milliseconds
    return parsed


def percentile_name(percent: float) -> str:
    """Name of a percentile in results, such as p99 or p99.9."""
    return f"p{percent:g}"


def _num_good(completed: Sequence[Outcome], goodput: Mapping[str, float]) -> int:
    """Number of requests that meet all targets; one without a value, such as a single token's tpot, meets it."""
    return sum(all(_meets(outcome, metric, target) for metric, target in goodput.items()) for outcome in completed)


def _meets(outcome: Outcome, metric: str, target_ms: float) -> bool:
    return all(1000 * value <= target_ms for value in metric_values([outcome], metric))


def metric_values(completed: Sequence[Outcome], metric: str) -> list[float]:
    """Values of a metric in seconds."""
    if metric == "itl":
        return [value for outcome in completed for value in outcome.itl_s]
    if metric == "e2el":
        return [outcome.latency_s for outcome in completed]
    values = [outcome.ttft_s if metric == "ttft" else outcome.tpot_s for outcome in completed]
    return [value for value in values if value is not None]


def _figures_of(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    names = [f"mean_{metric}_ms", f"median_{metric}_ms", f"std_{metric}_ms"]
    names += [f"{percentile_name(percent)}_{metric}_ms" for percent in percentiles]
    if not values:
        return dict.fromkeys(names)
    milliseconds = 1000 * np.asarray(values)
    figures = [milliseconds.mean(), np.median(milliseconds), milliseconds.std()]
    figures += list(np.percentile(milliseconds, percentiles))
    return {name: float(figure) for name, figure in zip(names, figures, strict=True)}


def _most_tokens_per_second(completed: Sequence[Outcome]) -> float | None:
    """Most tokens that arrived within a second, of whole seconds from the start; None without streaming."""
    times = np.asarray([time for outcome in completed for time in outcome.chunk_times])
    weights = np.repeat(
        [outcome.output_len / max(len(outcome.chunk_times), 1) for outcome in completed],
        [len(outcome.chunk_times) for outcome in completed],
    )
    if not len(times):
        return None
    seconds = (times - min(outcome.start for outcome in completed)).astype(int)
    return float(np.bincount(seconds, weights).max())
