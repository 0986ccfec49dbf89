"""Picture of the results of `penstock bench` as SVG: a panel per figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.bench.picture import Panel, Point, Series, chart, number
from penstock.bench.report import figures, title
from penstock.bench.workloads import Settings, swept_setting

# Figures of long contexts, with their titles and factors.
_OF_CONTEXTS = (
    ("prefill_tokens_per_s", "prefill, tok/s", 1.0),
    ("output_tokens_per_s", "output, tok/s", 1.0),
    ("step_s", "decode step, ms", 1e3),
)


def as_svg(model: str, sweep: Sequence[Settings], results: Sequence[Any]) -> str:
    """Picture of a workload's results; one per run of the sweep.

    Of one run, each figure's panel has the 10th to 90th percentile of its values; of several, the medians by the
    setting that differs. "prefix" has a line for new and one for known prefixes. "long-context" has the medians by
    context, with a line per batch size.
    """
    if sweep[0].workload == "long-context":
        rows = [row for its_rows in results for row in its_rows]
        panels = [_by_context(rows, *figure) for figure in _OF_CONTEXTS]
        return chart(f"{model}: long-context", "medians by context length", panels)
    swept = swept_setting(sweep)
    if swept is None:
        return chart(f"{model}: {title(sweep[0])}", "values in ascending order", _by_percentile(sweep[0], results[0]))
    words = swept.replace("_", " ").replace(" len", " length")
    return chart(f"{model}: {sweep[0].workload} by {words}", "medians", _by_setting(sweep, results, swept, words))


def _by_percentile(settings: Settings, results: Any) -> list[Panel]:
    panels = []
    for words, summaries in _figures(settings, results):
        lines = {
            label: [(float(at), factor * value) for at, value in summary["percentiles"].items() if at != "99"]
            for label, (summary, factor) in summaries.items()
        }
        panels.append(_panel(words, "percent of the values", lines, len(next(iter(lines.values()))) // 2))
    return panels


def _by_setting(sweep: Sequence[Settings], results: Sequence[Any], swept: str, words: str) -> list[Panel]:
    found = [_figures(settings, its_results) for settings, its_results in zip(sweep, results, strict=True)]
    panels = []
    for figure in zip(*found, strict=True):
        lines: dict[str, list[Point]] = {}
        for settings, (_, summaries) in zip(sweep, figure, strict=True):
            for label, (summary, factor) in summaries.items():
                lines.setdefault(label, []).append((float(getattr(settings, swept)), factor * summary["median"]))
        panels.append(_panel(figure[0][0], words, lines))
    return panels


def _figures(settings: Settings, results: Any) -> list[tuple[str, dict[str, tuple[dict[str, Any], float]]]]:
    """Title of each figure, and its summaries with their factors by label."""
    if settings.workload == "prefix":
        named = {"new": results["new_prefix"], "known": results["known_prefix"]}
    else:
        named = {"": results}
    rows = zip(*(figures(settings, one) for one in named.values()), strict=True)
    return [
        (f"{row[0][0]}, {row[0][3]}", {label: (one[1], one[2]) for label, one in zip(named, row, strict=True)})
        for row in rows
    ]


def _by_context(rows: list[dict[str, Any]], name: str, words: str, factor: float) -> Panel:
    lines: dict[str, list[Point]] = {}
    for row in rows:
        requests = f"{row['batch_size']} requests"
        lines.setdefault(requests, []).append((float(row["context"]), factor * row[name]["median"]))
    return _panel(words, "tokens of context", lines)


def _panel(words: str, unit: str, lines: dict[str, list[Point]], labelled: int = -1) -> Panel:
    """Panel of lines by label. labelled: index of the point whose value is written."""
    series = []
    for label, line in lines.items():
        named = line[labelled]
        value = f"{label} {number(named[1])}".strip()
        series.append(Series(line, [(point, value if point is named else "") for point in line]))
    return Panel(words, unit, series)
