"""Tables of a server benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock.bench.report import number
from penstock.bench.serving.results import METRICS, percentile_name
from penstock.bench.serving.run import ServeResult, ServeSettings
from penstock.observability.printable import one_line


def report(settings: ServeSettings, result: ServeResult) -> Group:
    """Return the tables: throughput, latencies, and failures if there are any."""
    parts: list[Any] = [_totals(settings, result), _latencies(settings, result.figures)]
    if result.figures["failures"]:
        parts.append(_failures(result.figures))
    if result.figures["num_without_usage"]:
        count = result.figures["num_without_usage"]
        parts.append(Text(f"{count:,} responses had no usage, so their chunks are counted as their output tokens."))
    return Group(*parts)


def _totals(settings: ServeSettings, result: ServeResult) -> Table:
    figures = result.figures
    table = Table(title=_title(settings, result), title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    ends = {name: figures[name] for name in ("completed", "failed", "rejected", "disconnected")}
    for name, count in ends.items():
        if count or name in ("completed", "failed"):
            table.add_row("of which rejected (429)" if name == "rejected" else name, f"{count:,}", "requests")
    table.add_row("duration", number(figures["duration"]), "s")
    table.add_row("request throughput", number(figures["request_throughput"]), "1/s")
    if figures["request_goodput"] is not None:
        targets = " ".join(f"{metric}:{target:g}" for metric, target in settings.goodput.items())
        table.add_row("goodput", number(figures["request_goodput"]), f"1/s within {targets}")
    table.add_row(
        "output throughput", number(figures["output_throughput"]), f"tok/s of {figures['total_output_tokens']:,}"
    )
    both = figures["total_input_tokens"] + figures["total_output_tokens"]
    table.add_row("total throughput", number(figures["total_token_throughput"]), f"tok/s of {both:,}")
    if figures["max_output_tokens_per_s"] is not None:
        table.add_row("peak output throughput", number(figures["max_output_tokens_per_s"]), "tok/s in a second")
    table.add_row("peak concurrency", f"{figures['max_concurrent_requests']:,}", "requests")
    return table


def _title(settings: ServeSettings, result: ServeResult) -> str:
    load = settings.load
    most = "" if load.max_concurrency is None else f", at most {load.max_concurrency:,} open"
    return (
        f"{result.model.id}, {settings.dataset.name}, {settings.dataset.num_prompts:,} requests, {load.rate}{most}, "
        f"{settings.base_url}"
    )


def _latencies(settings: ServeSettings, figures: Mapping[str, Any]) -> Table:
    percentiles = [percentile_name(percent) for percent in settings.metric_percentiles if percent != 50]
    columns = ["mean", "median", "std", *percentiles]
    table = Table("milliseconds")
    for column in columns:
        table.add_column(column, justify="right")
    for metric in settings.percentile_metrics:
        values = [figures[f"{column}_{metric}_ms"] for column in columns]
        table.add_row(f"{METRICS[metric]} ({metric})", *("-" if value is None else number(value) for value in values))
    return table


def _failures(figures: Mapping[str, Any]) -> Table:
    caption = None
    if figures["retry_after_s"] is not None:
        caption = f"longest Retry-After: {figures['retry_after_s']:g} s"
    table = Table("failed because of", "requests", "first error", caption=caption, caption_justify="left")
    for cause, failure in figures["failures"].items():
        table.add_row(cause, f"{failure['count']:,}", Text(one_line(failure["first"])))
    return table
