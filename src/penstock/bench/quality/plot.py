"""Plot of `penstock eval` as SVG: bytes of the weights to the right, mean change upwards."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.bench.picture import FONTS
from penstock.bench.quality.run import Quality

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 110, 40, 50
_NUM_TICKS = 4
_MIB = 1 << 20


def svg(title: str, results: Sequence[Quality]) -> str:
    """Return a point per format, with the axes from zero."""
    points = [(result.weight_bytes / _MIB, result.closeness.mean_change, result.format) for result in results]
    right = max(size for size, _, _ in points) * 1.1
    top = max(change for _, change, _ in points) * 1.1 or 1.0
    place = _Place(right, top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="{FONTS}" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, _TOP - 16, title, size=14),
        *_axes(place),
    ]
    for size, change, name in points:
        x, y = place.of(size, change)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#1f6fb2"/>')
        parts.append(_text(x + 8, y - 6, name))
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Place:
    """Coordinates of the picture. right, top: values at the ends of the axes."""

    def __init__(self, right: float, top: float) -> None:
        self.right, self.top = right, top

    def of(self, size: float, change: float) -> tuple[float, float]:
        x = _LEFT + size / self.right * (_WIDTH - _LEFT - _RIGHT)
        return x, _HEIGHT - _BOTTOM - change / self.top * (_HEIGHT - _TOP - _BOTTOM)


def _axes(place: _Place) -> list[str]:
    left, bottom = place.of(0, 0)
    right, top = place.of(place.right, place.top)
    parts = [f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#444"/>']
    for step in range(_NUM_TICKS + 1):
        size, change = place.right * step / _NUM_TICKS, place.top * step / _NUM_TICKS
        x, y = place.of(size, change)
        parts.append(_text(x, bottom + 18, f"{size:.3g}", anchor="middle"))
        parts.append(_text(left - 8, y + 4, f"{change:.2g}", anchor="end"))
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>' if step else "")
    parts.append(_text((left + right) / 2, bottom + 38, "weights, MiB", anchor="middle"))
    parts.append(_text(left, top - 4, "mean change of a token's log-probability, nats"))
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
