"""Pictures of benchmarks as SVG: panels with axes, in light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

_PANEL_WIDTH, _PANEL_HEIGHT, _GAP, _MARGIN = 340, 200, 28, 20
_HEAD, _LEFT, _FOOT, _TITLE = 56, 56, 34, 24
# Common fonts of desktops by name, since programs that convert an SVG may not know the generic ones.
FONTS = "system-ui, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"
_STYLE = """
  text { font: 12px FONTS; fill: #1f2328 }
  .page { fill: #ffffff; stroke: #d1d9e0 }
  .head { font-size: 16px; font-weight: 600 } .title { font-weight: 600 }
  .quiet { fill: #59636e } .right { text-anchor: end } .middle { text-anchor: middle }
  .second { stroke: #c07a12 !important }
  .axis { stroke: #d1d9e0 } .curve { fill: none; stroke: #0b6e82; stroke-width: 2 }
  .dot { fill: #0b6e82; fill-opacity: 0.45 } .mark { fill: #c07a12 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .page { fill: #0d1117; stroke: #3d444d } .quiet { fill: #9198a1 }
    .axis { stroke: #3d444d } .curve { stroke: #58bccf } .dot { fill: #58bccf } .mark { fill: #e2a84a }
  }
"""

Point = tuple[float, float]
# Lines of a panel, in its own coordinates.
Panel = Sequence[str]


def page(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """Picture of panels in two columns."""
    num_rows = max(1, math.ceil(len(panels) / 2))
    width = 2 * _MARGIN + 2 * _PANEL_WIDTH + _GAP
    height = _HEAD + num_rows * (_PANEL_HEIGHT + _GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f"<style>{_STYLE.replace('FONTS', FONTS)}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>',
        text(title, _MARGIN, 28, "head"),
        text(subtitle, _MARGIN, 46, "quiet"),
    ]
    for index, panel in enumerate(panels):
        x = _MARGIN + index % 2 * (_PANEL_WIDTH + _GAP)
        y = _HEAD + index // 2 * (_PANEL_HEIGHT + _GAP)
        lines += [f'<g class="panel" transform="translate({x} {y})">', *panel, "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


class Scale:
    """Axes of a panel from 0, each of a unit of its own."""

    def __init__(self, most_x: float, most_y: float) -> None:
        self._end_x = axis_end(most_x)
        self._end_y = axis_end(most_y)

    def at(self, x: float, y: float) -> Point:
        bottom = _PANEL_HEIGHT - _FOOT
        return (
            _LEFT + (_PANEL_WIDTH - _LEFT) * x / self._end_x,
            bottom - (bottom - _TITLE) * y / self._end_y,
        )

    def place(self, x: float, y: float) -> str:
        return ",".join(f"{value:.1f}" for value in self.at(x, y))

    def frame(self, title: str, unit: str) -> list[str]:
        """Title, grid and numbers. unit: of x."""
        lines = [text(title, 0, 12, "title")]
        for share in (0.0, 0.5, 1.0):
            (left, y), (right, _) = self.at(0.0, share * self._end_y), self.at(self._end_x, 0.0)
            lines.append(f'<line class="axis" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
            lines.append(text(number(share * self._end_y), left - 6, y + 4, "quiet right"))
            x, bottom = self.at(share * self._end_x, 0.0)
            place = "quiet" if share == 0 else "quiet right" if share == 1 else "quiet middle"
            lines.append(text(number(share * self._end_x), x, bottom + 16, place))
        lines.append(text(unit, self.at(self._end_x, 0.0)[0], bottom + 31, "quiet right"))
        return lines


def curve(scale: Scale, points: Sequence[Point], kind: str = "curve") -> str:
    """Line through points."""
    return f'<polyline class="{kind}" points="{" ".join(scale.place(*point) for point in points)}"/>'


def dot(scale: Scale, point: Point, kind: str = "mark", radius: float = 3.0) -> str:
    """Dot at a point. kind: class of the style."""
    x, y = scale.at(*point)
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"/>'


def axis_end(value: float) -> float:
    """Smallest of 1, 2, 5, 10, 20 … (and 0.5, 0.2 …) that is not below a value."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((digit * power for digit in (1, 2, 5) if digit * power >= value), 10 * power)


def number(value: float) -> str:
    """Short form of a number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def text(words: str, x: float, y: float, kind: str) -> str:
    """Words at a place. kind: classes of the style."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'
