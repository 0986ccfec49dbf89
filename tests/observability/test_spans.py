"""Traces of spans: what Chrome's format demands, and what a viewer shows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from penstock.observability.spans import ProcessSpans, Span, SpanLog, trace_of, write_trace


def events_of(*processes: ProcessSpans) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = trace_of(processes)["traceEvents"]
    return events


def test_processes_and_tracks_have_names() -> None:
    core = ProcessSpans("engine core", [Span("schedule", 5.0, 5.001, "phases")])
    rank = ProcessSpans("rank 0", [Span("execute", 5.002, 5.004, "steps"), Span("eager", 5.002, 5.004, "executables")])
    named = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events_of(core, rank)
        if event["ph"] == "M" and "name" in event["args"]
    }
    assert named == {
        ("process_name", 0, 0): "engine core",
        ("thread_name", 0, 0): "phases",
        ("process_name", 1, 0): "rank 0",
        ("thread_name", 1, 0): "steps",
        ("thread_name", 1, 1): "executables",
    }


def test_events_begin_at_zero_in_the_order_of_time_and_outer_ones_come_first() -> None:
    spans = [Span("prepare", 2.0, 2.5, "steps"), Span("step", 2.0, 3.0, "steps"), Span("earlier", 1.0, 2.0, "steps")]
    shown = [
        (one["name"], one["ts"], one["dur"]) for one in events_of(ProcessSpans("rank 0", spans)) if one["ph"] == "X"
    ]
    assert shown == [("earlier", 0.0, 1e6), ("step", 1e6, 1e6), ("prepare", 1e6, 5e5)]


def test_times_of_another_host_are_placed_by_unix_time() -> None:
    here = ProcessSpans("rank 0", [Span("step", 100.0, 101.0, "steps")], host="here", unix_offset_s=1000.0)
    there = ProcessSpans("rank 1", [Span("step", 7.0, 8.0, "steps")], host="there", unix_offset_s=1093.5)
    assert [event["ts"] for event in events_of(here, there) if event["ph"] == "X"] == [0.0, 500_000.0]


def test_a_log_records_between_start_and_take() -> None:
    log = SpanLog()
    log.begin()
    log.end("before", "steps")
    log.start()
    log.end("prepare", "steps", step=3)
    log.end("execute", "steps")
    log.copy("program", "executables")
    first, second, copied = taken = log.take()
    assert [(span.name, span.track, span.arguments) for span in taken] == [
        ("prepare", "steps", {"step": 3}),
        ("execute", "steps", None),
        ("program", "executables", None),
    ]
    assert first.begin_s <= first.end_s == second.begin_s <= second.end_s
    assert copied[1:3] == second[1:3]
    log.end("after", "steps")
    assert log.take() == []


def test_a_trace_may_be_compressed(tmp_path: Path) -> None:
    process = ProcessSpans("rank 0", [Span("step", 1.0, 2.0, "steps")])
    write_trace(tmp_path / "a.json", [process])
    write_trace(tmp_path / "a.json.gz", [process])
    plain = (tmp_path / "a.json").read_bytes()
    assert json.loads(plain) == trace_of([process])
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == plain
