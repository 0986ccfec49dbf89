"""Picture of the results of `penstock bench` as SVG: a panel per figure."""

from __future__ import annotations

from typing import Any

from penstock.bench.picture import Panel, Scale, curve, dot, number, text
from penstock.bench.picture import page as picture
from penstock.bench.report import figures, title
from penstock.bench.workloads import Settings

# Figures of long contexts, with their titles and factors.
_OF_CONTEXTS = (
    ("prefill_tokens_per_s", "prefill, tok/s", 1.0),
    ("output_tokens_per_s", "output, tok/s", 1.0),
    ("step_s", "decode step, ms", 1e3),
)
_Line = list[tuple[float, float]]


def as_svg(model: str, settings: Settings, results: Any) -> str:
    """Picture of a workload's results.

    Each figure's panel has the 10th to 90th percentile of its values; for "prefix" of new and of known prefixes; for
    "long-context" the medians by context, of each batch size.
    """
    if settings.workload == "long-context":
        panels = [_by_context(results, *figure) for figure in _OF_CONTEXTS]
        return picture(f"{model}: long-context", "medians by context length", panels)
    if settings.workload == "prefix":
        named = {"new": results["new_prefix"], "known": results["known_prefix"]}
    else:
        named = {"": results}
    rows = {label: figures(settings, one) for label, one in named.items()}
    panels = []
    for row in zip(*rows.values(), strict=False):
        (name, _, factor, unit), lines = row[0], {}
        for label, (_, summary, _, _) in zip(rows, row, strict=True):
            lines[label] = [(float(at), factor * value) for at, value in summary["percentiles"].items() if at != "99"]
        panels.append(_panel(f"{name}, {unit}", "percent of the values", lines))
    return picture(f"{model}: {title(settings)}", "values in ascending order", panels)


def _by_context(rows: list[dict[str, Any]], name: str, words: str, factor: float) -> Panel:
    lines: dict[str, _Line] = {}
    for row in rows:
        requests = f"{row['batch_size']} requests"
        lines.setdefault(requests, []).append((float(row["context"]), factor * row[name]["median"]))
    return _panel(words, "tokens of context", lines)


def _panel(words: str, unit: str, lines: dict[str, _Line]) -> Panel:
    """Panel of lines by label, each with its last value."""
    points = [point for line in lines.values() for point in line]
    scale = Scale(max(x for x, _ in points), max(y for _, y in points))
    drawn = []
    for index, (label, line) in enumerate(lines.items()):
        kind = "curve second" if index % 2 else "curve"
        x, y = scale.at(*line[-1])
        middle = sorted(line)[len(line) // 2][1]
        drawn.append(curve(scale, line, kind))
        drawn += [dot(scale, point) for point in line]
        # Above the first line and below the second one, which may be close to it.
        drawn.append(text(f"{label} {number(middle)}".strip(), x - 6, y + (18 if index % 2 else -8), "right"))
    return [*scale.frame(words, unit), *drawn]
