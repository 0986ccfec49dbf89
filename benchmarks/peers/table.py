"""The results as a Markdown page and as JSON."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.catalogue import ENGINES, REFERENCE, EngineSpec
from benchmarks.peers.measure import STARTUP, find_workload
from benchmarks.peers.mixtures import ALL_SHAPES
from benchmarks.peers.results import Results, Summary, agreement, summarise
from benchmarks.peers.shapes import ModelShape
from benchmarks.workloads import Workload

LETTERS = {"decode": "A", "throughput": "B", "prefill": "C", "shared prefix": "D", STARTUP: "E"}


def report(results: Results) -> dict[str, Any]:
    """Data of the page: a row for each measured model, workload and engine."""
    machines = [record for record in results.records if record["kind"] == "machine"]
    rows = [
        row
        for shape in ALL_SHAPES.values()
        for workload in LETTERS
        for engine in ENGINES.values()
        if (row := _row(results, shape, workload, engine)) is not None
    ]
    return {
        "machine": {key: value for key, value in machines[-1].items() if key != "kind"} if machines else {},
        "versions": _versions(results),
        "rows": rows,
        "unavailable": _unavailable(results, rows),
    }


def _unavailable(results: Results, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Engines that could not be installed or converted, and were not measured later either."""
    measured = {(row["engine"], row["model"]) for row in rows} | {(row["engine"], None) for row in rows}
    return [
        record
        for record in results.records
        if record["kind"] == "unavailable" and (record["engine"], record["model"]) not in measured
    ]


def _row(results: Results, shape: ModelShape, name: str, engine: EngineSpec) -> dict[str, Any] | None:
    records = results.of(shape.name, name, engine.name)
    if not records:
        return None
    row = {"model": shape.name, "workload": name, "engine": engine.name}
    errors = [record["error"] for record in records if "error" in record]
    summary = summarise(records)
    if summary is None:
        return {**row, "error": errors[-1]}
    reference_records = results.of(shape.name, name, REFERENCE)
    reference = summarise(reference_records)
    workload = None if name == STARTUP else find_workload(name, shape, draw=1)
    same = agreement(records, reference_records)
    return {
        **row,
        "repeats": summary.num_repeats,
        "seconds": summary.seconds,
        "figure": summary.seconds if workload is None else workload.num_units / summary.seconds,
        "unit": "s" if workload is None else workload.unit,
        "spread": summary.spread,
        "reference_ratio": None if reference is None else summary.seconds / reference.seconds,
        "share_of_ceiling": _share_of_ceiling(shape, workload, engine, summary),
        "memory_gb_s": summary.memory_gb_s,
        "gflop_s": summary.gflop_s,
        "same_first_token": None if same is None else same[0],
        "same_beginning": None if same is None else same[1],
    }


def _share_of_ceiling(
    shape: ModelShape, workload: Workload | None, engine: EngineSpec, summary: Summary
) -> float | None:
    """Share of the ceiling: memory bandwidth over weight bytes (decode), or float32 throughput (prefill)."""
    if workload is None or summary.memory_gb_s is None or summary.gflop_s is None:
        return None
    if workload.name == "decode":
        least = workload.num_units * shape.bytes_per_decoded_token(engine.bits_per_weight) / (summary.memory_gb_s * 1e9)
    elif workload.name == "prefill":
        flop = shape.flop_of_prefill(workload.num_units, len(workload.prompts))
        least = flop / (summary.gflop_s * 1e9)
    else:
        return None
    return least / summary.seconds


def _versions(results: Results) -> dict[str, str]:
    versions: dict[str, str] = {}
    for record in results.records:
        versions |= record.get("versions", {})
    return versions


def as_markdown(data: dict[str, Any]) -> str:
    lines = ["# Penstock and other engines on CPU", ""]
    lines += [", ".join(f"{key} {value}" for key, value in data["machine"].items()), ""]
    lines += [", ".join(f"{name} {version}" for name, version in sorted(data["versions"].items())), ""]
    lines += [
        "Random weights, rounded to bfloat16 in all engines; prompts of token ids, greedy, fixed output lengths. "
        "Engines take turns in every repeat. Figures are medians; spread is (largest - smallest) / median.",
        "",
    ]
    if steady := data["machine"].get("steady"):
        lines += [
            f"Only what was measured while the machine allowed {steady:.0%} of the most arithmetic seen until then, "
            "right before and right after; the rest was measured again.",
            "",
        ]
    for name in dict.fromkeys(row["model"] for row in data["rows"]):
        lines += [f"## {name}", "", f"{ALL_SHAPES[name].title}.", ""]
        rows = [row for row in data["rows"] if row["model"] == name]
        lines += [*_overview(rows), *_ratios(rows), "", *_details(rows), ""]
    return "\n".join([*lines, *_notes(data)]).rstrip() + "\n"


def _overview(rows: list[dict[str, Any]]) -> list[str]:
    """One row per engine, one column per workload."""
    workloads = [name for name in LETTERS if any(row["workload"] == name for row in rows)]
    units = {row["workload"]: row["unit"] for row in rows if "unit" in row}
    heads = [f"{LETTERS[name]} {name}" + (f", {units[name]}" if name in units else "") for name in workloads]
    lines = ["| engine | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * len(workloads)]
    for engine in ENGINES.values():
        by_workload = {row["workload"]: row for row in rows if row["engine"] == engine.name}
        if by_workload:
            cells = [_figure(by_workload.get(name)) for name in workloads]
            lines.append(f"| {engine.title} | " + " | ".join(cells) + " |")
    return lines


def _ratios(rows: list[dict[str, Any]]) -> list[str]:
    """More lines of the overview: how many times as fast Penstock is as the fastest of some others."""
    workloads = [name for name in LETTERS if any(row["workload"] == name for row in rows)]
    seconds = {(row["workload"], row["engine"]): row["seconds"] for row in rows if "seconds" in row}
    lines = []
    for title, ours, others in _comparisons():
        cells = []
        for name in workloads:
            theirs = [seconds[name, other] for other in others if (name, other) in seconds]
            is_known = (name, ours) in seconds and theirs
            cells.append(f"{min(theirs) / seconds[name, ours]:.2f} ×" if is_known else "")
        if any(cells):
            lines.append(f"| *{title}* | " + " | ".join(cells) + " |")
    return lines


def _comparisons() -> list[tuple[str, str, list[str]]]:
    """(what, our engine, the others)."""

    def others(*bits: float) -> list[str]:
        return [e.name for e in ENGINES.values() if e.driver != "penstock" and e.bits_per_weight in bits]

    as_run = [e.name for e in ENGINES.values() if e.environment is not None and e.is_default]
    return [
        ("Penstock float32 relative to the fastest other in float32", REFERENCE, others(32)),
        ("Penstock bfloat16 relative to the fastest other in bfloat16", "penstock-bfloat16", others(16)),
        ("Penstock as its users run it relative to the fastest other as its users run it", "penstock-bfloat16", as_run),
        ("Penstock int8 relative to the fastest other with int8 weights", "penstock-int8", others(8, 8.5)),
        ("Penstock bfloat16 relative to its float32", "penstock-bfloat16", [REFERENCE]),
        ("Penstock int8 relative to its float32", "penstock-int8", [REFERENCE]),
        ("Penstock int4 relative to its int8", "penstock-int4", ["penstock-int8"]),
    ]


def _details(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| workload | engine | median | spread | repeats | Penstock float32 is | of the ceiling | "
        "memory, GB/s | same first token | same beginning |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        title = f"{LETTERS[row['workload']]} {row['workload']} | {ENGINES[row['engine']].title}"
        if "error" in row:
            lines.append(f"| {title} | failed: {_in_a_cell(row['error'])} |" + " |" * 7)
            continue
        ratio = (
            "" if row["engine"] == REFERENCE or row["reference_ratio"] is None else f"{row['reference_ratio']:.2f} ×"
        )
        cells = [
            f"{_figure(row)} {row['unit']}",
            _percent(row["spread"]),
            str(row["repeats"]),
            ratio,
            _percent(row["share_of_ceiling"]),
            "" if row["memory_gb_s"] is None else f"{row['memory_gb_s']:.1f}",
            _percent(row["same_first_token"]),
            _percent(row["same_beginning"]),
        ]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines


def _notes(data: dict[str, Any]) -> list[str]:
    """Footnotes of the figures."""
    measured = {row["engine"] for row in data["rows"]}
    lines = [
        f"- {engine.title}: {engine.note}." for engine in ENGINES.values() if engine.note and engine.name in measured
    ]
    lines += [
        "- of the ceiling: A, of the memory bandwidth measured in turns, with every weight read once per token; C, "
        "of the float32 throughput measured in turns.",
        "- same first token, same beginning: as Penstock float32 on the same prompts, of the first 16 tokens.",
    ]
    for record in data["unavailable"]:
        where = "" if record["model"] is None else f", {record['model']}"
        lines.append(f"- {ENGINES[record['engine']].title}{where}: {_in_a_cell(record['reason'])}")
    return lines


def _figure(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "failed"
    return f"{row['figure']:.{0 if row['figure'] >= 100 else 1 if row['figure'] >= 10 else 2}f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%"


def _in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]
