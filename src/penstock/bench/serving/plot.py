"""Picture of a server benchmark as SVG: distributions of the latencies, and first tokens by length of the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from penstock.bench.serving.outcome import Outcome, Status
from penstock.bench.serving.results import METRICS, metric_values

_PANEL_WIDTH, _PANEL_HEIGHT, _GAP, _MARGIN = 340, 200, 28, 20
_HEAD, _LEFT, _FOOT, _TITLE = 56, 56, 34, 24
_MARKED_PERCENTS = (50, 99)
# Dots of a panel beyond which only every n-th one is drawn.
_MAX_DOTS = 2000
_STYLE = """
  text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
  .page { fill: #ffffff; stroke: #d1d9e0 }
  .head { font-size: 16px; font-weight: 600 } .title { font-weight: 600 }
  .quiet { fill: #59636e } .right { text-anchor: end } .middle { text-anchor: middle }
  .axis { stroke: #d1d9e0 } .curve { fill: none; stroke: #0b6e82; stroke-width: 2 }
  .dot { fill: #0b6e82; fill-opacity: 0.45 } .mark { fill: #c07a12 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .page { fill: #0d1117; stroke: #3d444d } .quiet { fill: #9198a1 }
    .axis { stroke: #3d444d } .curve { stroke: #58bccf } .dot { fill: #58bccf } .mark { fill: #e2a84a }
  }
"""

_Point = tuple[float, float]


def as_svg(title: str, subtitle: str, outcomes: Sequence[Outcome], metrics: Sequence[str]) -> str:
    """Picture of the completed requests.

    metrics: names of `METRICS`, each with a panel, unless it has no values.
    """
    completed = [outcome for outcome in outcomes if outcome.status is Status.COMPLETED]
    panels = [_distribution(name, values) for name in metrics if (values := sorted(metric_values(completed, name)))]
    firsts = [(float(one.prompt_len), 1000 * one.ttft_s) for one in completed if one.prompt_len and one.ttft_s]
    if firsts:
        panels.append(_dots(METRICS["ttft"] + " by length of the prompt", "prompt tokens", firsts))
    num_rows = max(1, math.ceil(len(panels) / 2))
    width = 2 * _MARGIN + 2 * _PANEL_WIDTH + _GAP
    height = _HEAD + num_rows * (_PANEL_HEIGHT + _GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>',
        _text(title, _MARGIN, 28, "head"),
        _text(subtitle, _MARGIN, 46, "quiet"),
    ]
    for index, panel in enumerate(panels):
        x = _MARGIN + index % 2 * (_PANEL_WIDTH + _GAP)
        y = _HEAD + index // 2 * (_PANEL_HEIGHT + _GAP)
        lines += [f'<g class="panel" transform="translate({x} {y})">', *panel, "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _distribution(metric: str, values_s: Sequence[float]) -> list[str]:
    """Values in ascending order over the share of them, with median and 99th percentile."""
    values = [1000 * value for value in values_s]
    last = max(1, len(values) - 1)
    scale = _Scale(100.0, values[-1])
    step = max(1, len(values) // _MAX_DOTS)
    shown = sorted({*range(0, len(values), step), len(values) - 1})
    points = " ".join(scale.place(100 * index / last, values[index]) for index in shown)
    marks = []
    for percent in _MARKED_PERCENTS:
        value = values[round(percent / 100 * last)] if len(values) > 1 else values[0]
        place = scale.at(percent, value)
        marks.append(f'<circle class="mark" cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="3.5"/>')
        marks.append(_text(f"p{percent} {_number(value)} ms", place[0] - 6, place[1] - 8, "right"))
    return [
        *scale.frame(METRICS[metric], "percent of the values"),
        f'<polyline class="curve" points="{points}"/>',
        *marks,
    ]


def _dots(title: str, unit: str, points: Sequence[_Point]) -> list[str]:
    scale = _Scale(max(x for x, _ in points), max(y for _, y in points))
    step = max(1, len(points) // _MAX_DOTS)
    places = [scale.at(x, y) for x, y in points[::step]]
    return [
        *scale.frame(title, unit),
        *(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places),
    ]


class _Scale:
    """Axes of a panel from 0: x of a unit of its own, y in milliseconds."""

    def __init__(self, most_x: float, most_y: float) -> None:
        self._end_x = axis_end(most_x)
        self._end_y = axis_end(most_y)

    def at(self, x: float, y: float) -> _Point:
        bottom = _PANEL_HEIGHT - _FOOT
        return (
            _LEFT + (_PANEL_WIDTH - _LEFT) * x / self._end_x,
            bottom - (bottom - _TITLE) * y / self._end_y,
        )

    def place(self, x: float, y: float) -> str:
        return ",".join(f"{value:.1f}" for value in self.at(x, y))

    def frame(self, title: str, unit: str) -> list[str]:
        """Title, grid and numbers."""
        lines = [_text(f"{title}, ms", 0, 12, "title")]
        for share in (0.0, 0.5, 1.0):
            (left, y), (right, _) = self.at(0.0, share * self._end_y), self.at(self._end_x, 0.0)
            lines.append(f'<line class="axis" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
            lines.append(_text(_number(share * self._end_y), left - 6, y + 4, "quiet right"))
            x, bottom = self.at(share * self._end_x, 0.0)
            place = "quiet" if share == 0 else "quiet right" if share == 1 else "quiet middle"
            label = f"{_number(share * self._end_x)} {unit}" if share == 1 else _number(share * self._end_x)
            lines.append(_text(label, x, bottom + 18, place))
        return lines


def axis_end(value: float) -> float:
    """Smallest of 1, 2, 5, 10, 20 … (and 0.5, 0.2 …) that is not below a value."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((digit * power for digit in (1, 2, 5) if digit * power >= value), 10 * power)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text(text: str, x: float, y: float, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
