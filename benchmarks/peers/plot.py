"""The results as a picture: a row for each engine, a column for each workload, bars as long as tokens per second.

Engines stand together by how many bits of a weight they read, so that like is beside like. SVG, written as text.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.peers.catalogue import ENGINES, REFERENCE, EngineSpec
from penstock.bench.picture import MARGIN, document, text

_TITLE = "Tokens per second, Penstock in float32 being 1"
_COLUMNS = {
    "decode": "1 request",
    "throughput": "32 requests",
    "prefill": "prefill",
    "shared prefix": "shared prefix",
}
_NAMES, _COLUMN, _BAR, _NUMBER = 178, 166, 104, 34
_HEAD, _ROW, _THICKNESS, _GAP, _FOOT = 92, 22, 14, 10, 30
_WIDTH = MARGIN + _NAMES + len(_COLUMNS) * _COLUMN

_STYLE = """
  .number { fill: #59636e; text-anchor: end; font-variant-numeric: tabular-nums }
  .even { stroke: #59636e; stroke-dasharray: 2 3 }
  .ours { fill: #0969da }
  .other { fill: #8c959f }
  @media (prefers-color-scheme: dark) {
    .number { fill: #9198a1 }
    .even { stroke: #9198a1 }
    .ours { fill: #4493f8 }
    .other { fill: #6e7681 }
  }
"""


def as_svg(data: dict[str, Any], model: str) -> str:
    """The tokens per second of one model's engines, as multiples of those of Penstock in float32.

    data: what `table.report` makes. model: a name of its rows.
    Raises ValueError where a workload lacks the figure that the others are multiples of.
    """
    ratios = _ratios(data, model)
    engines = [engine for engine in ENGINES.values() if any(name == engine.name for _, name in ratios)]
    engines.sort(key=lambda engine: (-round(engine.bits_per_weight), engine.environment is not None))
    most = {workload: max(ratio for (of, _), ratio in ratios.items() if of == workload) for workload in _COLUMNS}
    body, bottom = [], _HEAD
    for _, alike in groupby(engines, key=lambda engine: round(engine.bits_per_weight)):
        for engine in alike:
            body += _row(engine, bottom, ratios, most)
            bottom += _ROW
        bottom += _GAP
    heads = _heads(most, bottom - _GAP)
    height = bottom + _FOOT
    foot = text("longer is faster; each column has a scale of its own", MARGIN, height - 16, "quiet")
    return document(_TITLE, _subtitle(data["machine"], model), (_WIDTH, height), [*heads, *body, foot], _STYLE)


def _ratios(data: dict[str, Any], model: str) -> dict[tuple[str, str], float]:
    """By workload and engine."""
    figures = {
        (row["workload"], row["engine"]): row["figure"]
        for row in data["rows"]
        if row["model"] == model and row["workload"] in _COLUMNS and "figure" in row
    }
    for workload in _COLUMNS:
        if (workload, REFERENCE) not in figures:
            raise ValueError(f"{model} has no figure of {REFERENCE} for {workload}, which others are multiples of.")
    return {(workload, name): figure / figures[workload, REFERENCE] for (workload, name), figure in figures.items()}


def _subtitle(machine: dict[str, Any], model: str) -> str:
    where = f"{machine['cores']} cores of {machine['processor']} with {_widest(machine['instruction_sets'])}"
    return f"{model}, random weights; {where}; medians of {machine['date']}"


def _widest(instruction_sets: str) -> str:
    found = instruction_sets.split()
    return "AMX" if "amx_tile" in found else "AVX-512" if "avx512f" in found else "AVX2"


def _heads(most: dict[str, float], bottom: int) -> list[str]:
    """The columns' names, and a line in each where a bar would end that is as long as the reference's."""
    lines = []
    for column, (workload, head) in enumerate(_COLUMNS.items()):
        lines.append(text(head, _left(column), _HEAD - 14, "title"))
        even = _left(column) + _BAR / most[workload]
        lines.append(f'<line class="even" x1="{even:.1f}" y1="{_HEAD - 4}" x2="{even:.1f}" y2="{bottom}"/>')
    return lines


def _row(engine: EngineSpec, top: int, ratios: dict[tuple[str, str], float], most: dict[str, float]) -> list[str]:
    baseline = top + _THICKNESS - 2
    lines = [text(engine.title, MARGIN, baseline, "" if engine.environment is None else "quiet")]
    kind = "ours" if engine.environment is None else "other"
    for column, workload in enumerate(_COLUMNS):
        ratio = ratios.get((workload, engine.name))
        if ratio is None:
            continue
        length = _BAR * ratio / most[workload]
        lines.append(
            f'<rect class="bar {kind}" x="{_left(column)}" y="{top}" width="{length:.2f}" height="{_THICKNESS}">'
            f"<title>{escape(engine.title)}, {_COLUMNS[workload]}: {ratio:.2f} ×</title></rect>"
        )
        lines.append(text(f"{ratio:.2f}", _left(column) + _BAR + _NUMBER, baseline, "number"))
    return lines


def _left(column: int) -> int:
    return MARGIN + _NAMES + column * _COLUMN
