"""Tables of benchmark results."""

from __future__ import annotations

from typing import Any, TypeAlias

from rich.table import Table

from penstock.bench.workloads import Settings

# Name, summary, factor, unit.
Figure: TypeAlias = tuple[str, dict[str, Any], float, str]


def tables(settings: Settings, results: Any) -> list[Table]:
    """Return the tables of a workload's results, with medians first."""
    if settings.workload == "long-context":
        return [_long_context_table(results)]
    if settings.workload == "prefix":
        return [
            _figures_table(f"{title(settings)}, {words}", figures(settings, results[key]), _caption(results[key]))
            for key, words in (("new_prefix", "prefix not seen before"), ("known_prefix", "prefix served before"))
        ]
    return [_figures_table(title(settings), figures(settings, results), _caption(results))]


def figures(settings: Settings, results: dict[str, Any]) -> list[Figure]:
    """Return the figures of a workload's runs, but for those of long contexts."""
    if settings.workload == "startup":
        return _startup_rows(results)
    rates = {
        "latency": ("output_tokens_per_s",),
        "throughput": ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s"),
        "prefill": ("input_tokens_per_s",),
        "prefix": ("output_tokens_per_s",),
    }
    return _rows(results, *rates[settings.workload])


def title(settings: Settings) -> str:
    """Return the workload with its sizes."""
    parts = [settings.workload]
    if settings.workload != "startup":
        parts.append(f"{settings.num_requests} requests at once")
    if settings.prefix_len is not None:
        parts.append(f"{settings.prefix_len} shared")
    parts.append(f"{settings.input_len} in")
    several = f"{settings.n} times " if settings.n > 1 else ""
    parts.append(f"{several}{settings.output_len or 1} out")
    return ", ".join(parts)


def _caption(results: dict[str, Any]) -> str | None:
    """Return the draft acceptance, if there are drafts."""
    drafts = results.get("speculation")
    if drafts is None:
        return None
    rates = ", ".join(f"{rate:.2f}" for rate in drafts["acceptance_rate_per_pos"])
    return (
        f"{drafts['acceptance_rate']:.0%} of {drafts['num_draft_tokens']:,} drafts accepted, "
        f"{drafts['mean_acceptance_length']:.2f} tokens per step with drafts; by position {rates}"
    )


def _rows(results: dict[str, Any], *rates: str) -> list[Figure]:
    """Return rows of name, summary, factor, unit."""
    rows = [(_RATE_NAMES[name], results[name], 1.0, _RATE_UNITS[name]) for name in rates]
    rows.append(("all requests", results["latency_s"], 1.0, "s"))
    rows.append(("time to first token", results["time_to_first_token_s"], 1e3, "ms"))
    if "time_per_output_token_s" in results:
        rows.append(("time per output token", results["time_per_output_token_s"], 1e3, "ms"))
    return rows


_RATE_NAMES = {"output_tokens_per_s": "output", "input_tokens_per_s": "input", "requests_per_s": "requests"}
_RATE_UNITS = {"output_tokens_per_s": "tok/s", "input_tokens_per_s": "tok/s", "requests_per_s": "1/s"}


def _startup_rows(results: dict[str, Any]) -> list[Figure]:
    phases = [(f"of which {phase}", summary, 1.0, "s") for phase, summary in results["phases_s"].items()]
    return [("process start to first token", results["startup_s"], 1.0, "s"), *phases]


def _figures_table(heading: str, rows: list[Figure], caption: str | None = None) -> Table:
    table = Table(title=heading, title_justify="left", title_style="bold", caption=caption, caption_justify="left")
    table.add_column("")
    for column in ("median", "mean", "10%", "90%", "spread"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    for name, summary, factor, unit in rows:
        percentiles = summary["percentiles"]
        values = [summary["median"], summary["mean"], percentiles["10"], percentiles["90"]]
        table.add_row(name, *(number(factor * value) for value in values), f"{100 * summary['spread']:.0f}%", unit)
    return table


def _long_context_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="long-context, decoding", title_justify="left", title_style="bold")
    for heading in ("context", "requests", "prefill tok/s", "output tok/s", "step ms", "spread", "of memory's speed"):
        table.add_column(heading, justify="right")
    for row in rows:
        share = row.get("share_of_memory_speed")
        table.add_row(
            f"{row['context']:,}",
            str(row["batch_size"]),
            number(row["prefill_tokens_per_s"]["median"]),
            number(row["output_tokens_per_s"]["median"]),
            number(1e3 * row["step_s"]["median"]),
            f"{100 * row['step_s']['spread']:.0f}%",
            "" if share is None else f"{100 * share['median']:.0f}%",
        )
    return table


def number(value: float) -> str:
    """Format with at least three significant digits."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"
