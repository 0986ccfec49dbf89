"""Pictures of measurements as SVG, in light and dark: documents with a title, and charts of panels with axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

MARGIN = 20
_PAGE_WIDTH, _PANEL_HEIGHT, _GAP = 748, 200, 28
_HEAD, _LEFT, _FOOT, _TITLE = 56, 56, 34, 24
# Common fonts of desktops by name, since programs that convert an SVG may not know the generic ones.
FONTS = "system-ui, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"
_STYLE = """
  text { font: 12px FONTS; fill: #1f2328 }
  .page { fill: #ffffff; stroke: #d1d9e0 }
  .head { font-size: 16px; font-weight: 600 } .title { font-weight: 600 }
  .quiet { fill: #59636e } .right { text-anchor: end } .middle { text-anchor: middle }
  .axis { stroke: #d1d9e0 } .curve { fill: none; stroke: #0b6e82; stroke-width: 2 }
  .second { stroke: #c07a12 !important }
  .dot { fill: #0b6e82; fill-opacity: 0.45 } .mark { fill: #c07a12 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .page { fill: #0d1117; stroke: #3d444d } .quiet { fill: #9198a1 }
    .axis { stroke: #3d444d } .curve { stroke: #58bccf } .dot { fill: #58bccf } .mark { fill: #e2a84a }
  }
""".replace("FONTS", FONTS)

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of a panel. marks: points with words, which may be empty. curve: that it joins; dots: of points alone."""

    curve: Sequence[Point] = ()
    marks: Sequence[tuple[Point, str]] = ()
    dots: Sequence[Point] = ()

    @property
    def points(self) -> list[Point]:
        return [*self.curve, *(point for point, _ in self.marks), *self.dots]


@dataclass(frozen=True)
class Panel:
    """Series on axes from 0, each of a unit of its own. unit: of x; that of y is in the title."""

    title: str
    unit: str
    series: Sequence[Series]


def document(title: str, subtitle: str, size: tuple[float, float], body: Sequence[str], style: str = "") -> str:
    """SVG document of elements below its title. size: width and height. style: CSS for classes of the body's own."""
    width, height = size
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f"<style>{_STYLE}{style}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>',
        text(title, MARGIN, 28, "head"),
        text(subtitle, MARGIN, 46, "quiet"),
    ]
    return "\n".join([*lines, *body, "</svg>"]) + "\n"


def text(words: str, x: float, y: float, kind: str = "") -> str:
    """Words at a place. kind: classes of the style."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def chart(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """Picture of panels in two columns, or of one large panel."""
    num_columns, height = (1, 2 * _PANEL_HEIGHT) if len(panels) == 1 else (2, _PANEL_HEIGHT)
    width = (_PAGE_WIDTH - 2 * MARGIN - (num_columns - 1) * _GAP) / num_columns
    body = []
    for index, panel in enumerate(panels):
        row, column = divmod(index, num_columns)
        x, y = MARGIN + column * (width + _GAP), _HEAD + row * (height + _GAP)
        body += [f'<g class="panel" transform="translate({x:g} {y})">', *_draw(panel, width, height), "</g>"]
    num_rows = max(1, math.ceil(len(panels) / num_columns))
    return document(title, subtitle, (_PAGE_WIDTH, _HEAD + num_rows * (height + _GAP)), body)


def _draw(panel: Panel, right: float, height: float) -> list[str]:
    bottom = height - _FOOT
    end_x, end_y = (axis_end(max(ends)) for ends in zip(*(p for one in panel.series for p in one.points), strict=True))

    def at(point: Point) -> Point:
        return _LEFT + (right - _LEFT) * point[0] / end_x, bottom - (bottom - _TITLE) * point[1] / end_y

    lines = [text(panel.title, 0, 12, "title"), text(panel.unit, right, bottom + 31, "quiet right")]
    for share, align in ((0.0, ""), (0.5, " middle"), (1.0, " right")):
        x, y = at((share * end_x, share * end_y))
        lines.append(f'<line class="axis" x1="{_LEFT}" y1="{y:.1f}" x2="{right:g}" y2="{y:.1f}"/>')
        lines.append(text(number(share * end_y), _LEFT - 6, y + 4, "quiet right"))
        lines.append(text(number(share * end_x), x, bottom + 16, "quiet" + align))
    for index, series in enumerate(panel.series):
        is_second = index % 2
        if series.curve:
            places = " ".join("{:.1f},{:.1f}".format(*at(point)) for point in series.curve)
            lines.append(f'<polyline class="curve{" second" * is_second}" points="{places}"/>')
        marks = [(point, "mark", 3.5) for point, _ in series.marks]
        for point, kind, radius in (*((point, "dot", 3.0) for point in series.dots), *marks):
            x, y = at(point)
            lines.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"/>')
        for point, words in series.marks:
            # Above the first series and below the second one, which may be close to it; never beyond the panel's ends.
            x, y = at(point)
            shift, kind = (6, "") if 2 * point[0] < end_x else (-6, "right")
            lines += [text(words, x + shift, y + (18 if is_second else -8), kind)] if words else []
    return lines


def axis_end(value: float) -> float:
    """Smallest of 1, 2, 5, 10, 20 … (and 0.5, 0.2 …) that is not below a value."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((digit * power for digit in (1, 2, 5) if digit * power >= value), 10 * power)


def number(value: float) -> str:
    """Short form of a number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
