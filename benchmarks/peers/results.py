"""Measurements, appended to a file as they come, so that a run can be stopped and taken up again."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import cpuinfo, processor

FILE = "peers.jsonl"


class Results:
    """Results of a folder so far."""

    def __init__(self, folder: Path, file: str = FILE) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / file
        text = self._path.read_text() if self._path.exists() else ""
        if text and not text.endswith("\n"):
            # A run that was killed has left half a line.
            text = text[: text.rfind("\n") + 1]
            self._path.write_text(text)
        self.records: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def add_machine(self, threads: int, steady: float = 0.0) -> None:
        self._append({"kind": "machine", **describe_machine(threads), "steady": steady})

    def add_unavailable(self, engine: str, model: str | None, reason: str) -> None:
        """An engine that cannot run here, or not this model (None: none at all)."""
        record = {"kind": "unavailable", "engine": engine, "model": model, "reason": reason}
        if record not in self.records:
            self._append(record)

    def add(self, model: str, workload: str, engine: str, repeat: int, **fields: Any) -> None:
        at = datetime.datetime.now().isoformat(timespec="seconds")
        key = {"model": model, "workload": workload, "engine": engine, "repeat": repeat}
        self._append({"kind": "measurement", **key, "at": at, **fields})

    def has(self, model: str, workload: str, engine: str, repeat: int) -> bool:
        """Whether a repeat was measured without failure."""
        return any(r["repeat"] == repeat and "error" not in r for r in self.of(model, workload, engine))

    def of(self, model: str, workload: str, engine: str) -> list[dict[str, Any]]:
        key = (model, workload, engine)
        return [
            r for r in self.records if r["kind"] == "measurement" and (r["model"], r["workload"], r["engine"]) == key
        ]

    def _append(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


@dataclass(frozen=True)
class Summary:
    """The repeats of one engine. spread: (largest - smallest) / median. memory_gb_s, gflop_s: medians beside it."""

    num_repeats: int
    seconds: float
    spread: float
    memory_gb_s: float | None
    gflop_s: float | None


def summarise(records: list[dict[str, Any]]) -> Summary | None:
    """Summarise the repeats that did not fail; None if there is none."""
    records = [record for record in records if "error" not in record]
    if not records:
        return None
    seconds = [record["seconds"] for record in records]
    median = statistics.median(seconds)
    ceilings = [record["ceilings"] for record in records if record.get("ceilings")]
    return Summary(
        num_repeats=len(seconds),
        seconds=median,
        spread=(max(seconds) - min(seconds)) / median,
        memory_gb_s=statistics.median(c["memory_gb_s"] for c in ceilings) if ceilings else None,
        gflop_s=statistics.median(c["gflop_s"] for c in ceilings) if ceilings else None,
    )


def agreement(records: list[dict[str, Any]], reference: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Agreement over the repeats with the same prompts: the share of requests with the same first token, and the
    mean share of the reported tokens up to where a request's rows part. None when there is no such repeat."""
    expected = {_prompts_of(record): record["tokens"] for record in reference if "tokens" in record}
    pairs = [
        pair
        for record in records
        if "tokens" in record and _prompts_of(record) in expected
        for pair in zip(record["tokens"], expected[_prompts_of(record)], strict=True)
    ]
    if not pairs:
        return None
    same_first = [row[0] == other[0] for row, other in pairs]
    alike = [_num_alike(row, other) / len(other) for row, other in pairs]
    return statistics.mean(same_first), statistics.mean(alike)


def _prompts_of(record: dict[str, Any]) -> tuple[int, int | None]:
    return record["repeat"], record.get("draw")


def _num_alike(row: list[int], other: list[int]) -> int:
    """Tokens before the two part."""
    for index, (token, expected) in enumerate(zip(row, other, strict=True)):
        if token != expected:
            return index
    return len(row)


def describe_machine(threads: int) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "instruction_sets": _instruction_sets(),
        "cores": cores,
        "threads": threads,
        "python": platform.python_version(),
    }


def _instruction_sets() -> str:
    flags = set(cpuinfo("flags").split())
    wanted = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile")
    return " ".join(name for name in wanted if name in flags)
