"""The picture of measured figures, and that the README shows what the results have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks.peers.catalogue import ENGINES, REFERENCE
from benchmarks.peers.plot import as_svg

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"
WORKLOADS = ("decode", "throughput", "prefill", "shared prefix")
MACHINE = {"date": "2026-11-24", "processor": "A & B", "instruction_sets": "avx2 avx512f", "cores": 2}


def report(figures: dict[str, list[float | None]]) -> dict[str, Any]:
    """figures: of the workloads in order, by engine; None where an engine failed."""
    rows = [
        {"model": "llama-60m", "workload": workload, "engine": engine}
        | ({"error": "it ended"} if figure is None else {"figure": figure})
        for engine, row in figures.items()
        for workload, figure in zip(WORKLOADS, row, strict=True)
    ]
    startup = {"model": "llama-60m", "workload": "startup", "engine": REFERENCE, "figure": 2.0}
    return {"machine": MACHINE, "rows": [*rows, startup]}


def bars_of(svg: str) -> list[tuple[str, float, float]]:
    """What each bar says of itself, where it begins, and how long it is."""
    bars = [bar for bar in ElementTree.fromstring(svg).iter(f"{SVG}rect") if "bar" in bar.attrib["class"].split()]
    return [(bar.findtext(f"{SVG}title", ""), float(bar.attrib["x"]), float(bar.attrib["width"])) for bar in bars]


def test_there_is_a_bar_for_each_figure_as_long_as_it_is_large():
    figures: dict[str, list[float | None]] = {
        REFERENCE: [100.0, 400.0, 2000.0, 50.0],
        "penstock-int8": [250.0, 800.0, None, 60.0],
        "llama.cpp-f32": [50.0, 100.0, 1000.0, 75.0],
    }
    bars = bars_of(as_svg(report(figures), "llama-60m"))
    said = {text for text, _, _ in bars}
    assert len(bars) == 11
    assert "Penstock int8, 1 request: 2.50 ×" in said
    assert "llama.cpp f32, shared prefix: 1.50 ×" in said
    columns = sorted({x for _, x, _ in bars})
    assert len(columns) == len(WORKLOADS)
    for x, number in zip(columns, range(len(WORKLOADS)), strict=True):
        column = {text.split(",")[0]: width for text, begin, width in bars if begin == x}
        expected = {ENGINES[name].title: row[number] for name, row in figures.items() if row[number] is not None}
        scale = column["Penstock float32"] / figures[REFERENCE][number]
        assert column == {name: pytest.approx(scale * figure, abs=0.01) for name, figure in expected.items()}


def test_names_and_figures_are_written_beside_the_bars():
    svg = as_svg(report({REFERENCE: [1.0] * 4, "vllm-float32": [0.5, 0.25, 2.0, 3.0]}), "llama-60m")
    texts = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    for expected in ("Penstock float32", "vLLM CPU float32", "0.50", "0.25", "2.00", "3.00", "32 requests"):
        assert expected in texts
    assert "2 cores of A & B with AVX-512" in svg.replace("&amp;", "&")


def test_a_workload_without_the_reference_is_refused():
    figures: dict[str, list[float | None]] = {REFERENCE: [1.0, None, 1.0, 1.0], "vllm-float32": [1.0] * 4}
    with pytest.raises(ValueError, match="llama-60m has no figure of penstock-float32 for throughput"):
        as_svg(report(figures), "llama-60m")


def results_of_the_readme() -> dict[str, Any]:
    (path,) = re.findall(r"\[table\]\((benchmarks/results/\S+)\.md\)", README)
    data: dict[str, Any] = json.loads((REPOSITORY / f"{path}.json").read_text())
    return data


def test_the_picture_in_the_readme_is_of_the_results_that_it_names():
    (path,) = re.findall(r"!\[[^]]+\]\((\S+\.svg)\)", README)
    assert (REPOSITORY / path).read_text(encoding="utf-8") == as_svg(results_of_the_readme(), "llama-60m")


# Engines by precision, ours first.
COMPARED = {
    "float32": ("penstock-float32", "vllm-float32", "openvino-float32", "llama.cpp-f32"),
    "bfloat16": ("penstock-bfloat16", "vllm-bfloat16", "openvino-bfloat16", "llama.cpp-bf16"),
    "defaults": ("penstock-bfloat16", "vllm-bfloat16", "openvino-default", "llama.cpp-bf16"),
    "int8": ("penstock-int8", "openvino-int8", "llama.cpp-q8_0"),
}


def test_the_table_in_the_readme_has_the_ratios_of_the_results_that_it_names():
    cells = r" \| ([0-9.]*)" * len(WORKLOADS)
    rows = re.findall(rf"^\| [^|]+ \| (\w+){cells} \| \[figures\]\((\S+)\.md\) \|$", README, re.MULTILINE)
    assert len(rows) >= 4
    for precision, *shown, path in rows:
        results = json.loads((REPOSITORY / f"{path}.json").read_text())
        of_model = [row for row in results["rows"] if row.get("model", "llama-60m") == "llama-60m"]
        figures = {(row["engine"], row["workload"]): row["figure"] for row in of_model}
        ours, *others = COMPARED[precision]
        for workload, cell in zip(WORKLOADS, shown, strict=True):
            if cell:
                best = max(figures.get((other, workload), 0.0) for other in others)
                assert float(cell) == pytest.approx(figures[ours, workload] / best, abs=0.006), (path, workload)


def test_results_that_the_documentation_names_are_there():
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    names = [name for page in pages for name in re.findall(r"\d{4}-\d\d-\d\d-cpu-[\w-]+", page.read_text("utf-8"))]
    assert names
    there = {path.stem for path in (REPOSITORY / "benchmarks" / "results").iterdir()}
    assert set(names) <= there
