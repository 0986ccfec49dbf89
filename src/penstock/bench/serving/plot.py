"""Picture of a server benchmark as SVG: latencies, also by load, and first tokens by length of the prompt."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from penstock.bench.picture import Panel, Point, Series, chart, number
from penstock.bench.serving.outcome import Outcome, Status
from penstock.bench.serving.results import METRICS, metric_values

_MARKED_PERCENTS = (50, 99)
# Dots of a panel beyond which only every n-th one is drawn.
_MAX_DOTS = 2000


def as_svg(title: str, subtitle: str, outcomes: Sequence[Outcome], metrics: Sequence[str]) -> str:
    """Picture of the completed requests.

    metrics: names of `METRICS`, each with a panel, unless it has no values.
    """
    completed = [outcome for outcome in outcomes if outcome.status is Status.COMPLETED]
    panels = [_distribution(name, values) for name in metrics if (values := sorted(metric_values(completed, name)))]
    if completed:
        panels.append(_dots("End-to-end latency by requests at once", "requests", _latencies_by_load(outcomes)))
    firsts = [(float(one.prompt_len), 1000 * one.ttft_s) for one in completed if one.prompt_len and one.ttft_s]
    if firsts:
        panels.append(_dots(METRICS["ttft"] + " by length of the prompt", "prompt tokens", firsts))
    return chart(title, subtitle, panels)


def _distribution(metric: str, values_s: Sequence[float]) -> Panel:
    """Values in ascending order over the share of them, with median and 99th percentile."""
    values = [1000 * value for value in values_s]
    last = max(1, len(values) - 1)
    step = max(1, len(values) // _MAX_DOTS)
    shown = sorted({*range(0, len(values), step), len(values) - 1})
    marks = []
    for percent in _MARKED_PERCENTS:
        value = values[round(percent / 100 * (len(values) - 1))]
        marks.append(((float(percent), value), f"p{percent} {number(value)} ms"))
    curve = [(100 * index / last, values[index]) for index in shown]
    return Panel(f"{METRICS[metric]}, ms", "percent of the values", [Series(curve, marks)])


def _latencies_by_load(outcomes: Sequence[Outcome]) -> list[Point]:
    """Latency of each completed request in ms, over the requests under way when it began, itself included."""
    starts, ends = (sorted(getattr(one, name) for one in outcomes) for name in ("start", "end"))
    return [
        (float(bisect_right(starts, one.start) - bisect_right(ends, one.start)), 1000 * one.latency_s)
        for one in outcomes
        if one.status is Status.COMPLETED
    ]


def _dots(title: str, unit: str, points: Sequence[Point]) -> Panel:
    return Panel(f"{title}, ms", unit, [Series(dots=points[:: max(1, len(points) // _MAX_DOTS)])])
