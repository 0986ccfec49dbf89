"""Routing statistics of a benchmark: tokens per expert and layer as JSON, as a table, or as a heat map in SVG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from penstock.bench.picture import MARGIN, document, text
from penstock.engine.statistics.expert_load import imbalance
from penstock.errors import ConfigError

SUFFIXES = (".svg", ".json")

TokensPerExpert = Mapping[int, Sequence[int]]

# Upper ends of the ranges of a cell's colour: tokens over the mean of its layer. The last range has no end.
_ENDS = (0.0, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
_NAMES = ("none", "to ¼", "to ½", "to 0.8", "mean ± ¼", "to 2 ×", "to 4 ×", "more")
_COLOURS = ("#8b1a1a", "#2c7bb6", "#7fb8d8", "#c4dfea", "#eeeeee", "#fdc980", "#f08a3c", "#c43c0c")
_HEAD, _LEFT, _RIGHT, _FOOT, _KEY = 66, 44, 96, 46, 12
_GRID_WIDTH, _CELL_HEIGHT, _LEAST_GRID_HEIGHT = 640, 16, 64


def check_suffix(path: Path) -> None:
    """Raise ConfigError for a name that says neither SVG nor JSON."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"--expert-stats {path} is not valid. Allowed: a name that ends with {' or '.join(SUFFIXES)}."
        )


def as_text(path: Path, title: str, tokens: TokensPerExpert) -> str:
    """Contents of a file with this suffix."""
    return as_svg(title, tokens) if path.suffix == ".svg" else json.dumps(as_json(tokens), indent=2) + "\n"


def as_json(tokens: TokensPerExpert) -> list[dict[str, Any]]:
    """Statistics of each layer.

    imbalance: tokens of the busiest expert over the mean, 1 at best. unused: experts without a token.
    """
    return [
        {
            "layer": layer,
            "imbalance": imbalance(counts),
            "unused": sum(count == 0 for count in counts),
            "tokens": list(counts),
        }
        for layer, counts in tokens.items()
    ]


def table(tokens: TokensPerExpert) -> Table:
    """The layers' statistics without the counts of single experts."""
    made = Table(title="tokens per expert", title_justify="left", title_style="bold")
    for heading in ("layer", "mean", "busiest expert", "its tokens", "over the mean", "experts without tokens"):
        made.add_column(heading, justify="right")
    for layer, counts in tokens.items():
        most = max(counts)
        made.add_row(
            str(layer),
            f"{sum(counts) / len(counts):,.1f}",
            str(counts.index(most)),
            f"{most:,}",
            f"{imbalance(counts):.2f} ×",
            str(sum(count == 0 for count in counts)),
        )
    return made


def as_svg(title: str, tokens: TokensPerExpert) -> str:
    """Heat map: a row per layer, a column per expert, coloured by its tokens over the mean of the layer."""
    num_experts = max(len(counts) for counts in tokens.values())
    grid_height = max(_LEAST_GRID_HEIGHT, len(tokens) * _CELL_HEIGHT)
    cell_width, cell_height = _GRID_WIDTH / num_experts, grid_height / len(tokens)
    width, height = 2 * MARGIN + _LEFT + _GRID_WIDTH + _RIGHT, _HEAD + grid_height + _FOOT
    left, bottom = MARGIN + _LEFT, _HEAD + grid_height
    cells: list[list[str]] = [[] for _ in _COLOURS]
    labels = []
    for row, (layer, counts) in enumerate(tokens.items()):
        y, mean = _HEAD + row * cell_height, sum(counts) / len(counts)
        for expert, count in enumerate(counts):
            x = left + expert * cell_width
            cells[_range_of(count, mean)].append(
                f"M{x:.1f} {y:.1f}h{cell_width:.2f}v{cell_height:.1f}h-{cell_width:.2f}z"
            )
        middle = y + cell_height / 2 + 4
        labels.append(text(str(layer), left - 8, middle, "quiet right"))
        labels.append(text(f"{imbalance(counts):.2f} ×", left + _GRID_WIDTH + 8, middle))
    total = sum(map(sum, tokens.values()))
    subtitle = f"{num_experts} experts, {len(tokens)} layers, {total:,} choices; colour: over the layer's mean"
    body = [
        text("layer", left - 8, _HEAD - 6, "quiet right"),
        text("busiest", left + _GRID_WIDTH + 8, _HEAD - 6, "quiet"),
        *(f'<path fill="{colour}" d="{"".join(one)}"/>' for colour, one in zip(_COLOURS, cells, strict=True)),
        *labels,
        text("0", left, bottom + 16, "quiet"),
        text(f"expert {num_experts - 1}", left + _GRID_WIDTH, bottom + 16, "quiet right"),
        *_key(left, bottom + 22),
    ]
    return document(title, subtitle, (width, height), body)


def _key(left: float, top: float) -> list[str]:
    """Colours and their ranges."""
    step, lines = _GRID_WIDTH / len(_COLOURS), []
    for index, (colour, name) in enumerate(zip(_COLOURS, _NAMES, strict=True)):
        x = left + index * step
        lines.append(f'<rect x="{x:.1f}" y="{top}" width="{_KEY}" height="{_KEY}" fill="{colour}"/>')
        lines.append(text(name, x + _KEY + 4, top + _KEY - 2, "quiet"))
    return lines


def _range_of(count: int, mean: float) -> int:
    """Index of the colour of an expert with this many tokens."""
    if count == 0 or mean == 0:
        return 0
    return next((index for index, end in enumerate(_ENDS) if count / mean <= end), len(_ENDS))
