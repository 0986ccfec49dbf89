"""Spans of time by track, and their file: a trace in Chrome's format, which https://ui.perfetto.dev shows."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Spans of a process beyond which no more are kept, about 100 MB.
MOST_SPANS = 500_000
# Tracks of a rank: its steps with their phases, and how their forward passes ran.
STEPS, EXECUTABLES = "steps", "executables"


class Span(NamedTuple):
    """begin_s, end_s: `time.perf_counter` of its process. track: name of its track. arguments: shown beside it."""

    name: str
    begin_s: float
    end_s: float
    track: str
    arguments: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ProcessSpans:
    """Spans of one process. unix_offset_s: from `time.perf_counter` to Unix time, for those of other hosts."""

    name: str
    spans: Sequence[Span]
    host: str = field(default_factory=socket.gethostname)
    unix_offset_s: float = field(default_factory=lambda: time.time() - time.perf_counter())


class SpanLog:
    """Spans of one process between `start` and `take`, at most `MOST_SPANS` of them."""

    __slots__ = ("_begin_s", "_spans")

    def __init__(self) -> None:
        self._spans: list[Span] | None = None
        self._begin_s = 0.0

    @property
    def is_recording(self) -> bool:
        return self._spans is not None

    def start(self) -> None:
        """Record from now on, without the spans so far."""
        self._spans = []
        self._begin_s = time.perf_counter()

    def take(self) -> list[Span]:
        """Stop recording, and return the spans."""
        taken, self._spans = self._spans or [], None
        return taken

    def begin(self) -> None:
        """Begin a span now."""
        if self._spans is not None:
            self._begin_s = time.perf_counter()

    def end(self, name: str, track: str, **arguments: Any) -> None:
        """End the span that began last. The next one begins."""
        if self._spans is not None:
            now = time.perf_counter()
            self.add(name, self._begin_s, now, track, **arguments)
            self._begin_s = now

    def copy(self, name: str, track: str) -> None:
        """Add the last span to another track, under another name."""
        if self._spans:
            last = self._spans[-1]
            self.add(name, last.begin_s, last.end_s, track)

    def add(self, name: str, begin_s: float, end_s: float, track: str, **arguments: Any) -> None:
        """Add a span whose times are known."""
        if self._spans is not None and len(self._spans) < MOST_SPANS:
            self._spans.append(Span(name, begin_s, end_s, track, arguments or None))


def write_trace(path: Path, processes: Sequence[ProcessSpans]) -> None:
    """Write spans as a trace with a track per process and track name; `.gz` compresses it.

    Processes of the first one's host share its clock; those of other hosts are placed by Unix time.
    """
    text = json.dumps(trace_of(processes), separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def trace_of(processes: Sequence[ProcessSpans]) -> dict[str, Any]:
    """Return the trace: names of processes and tracks, then complete events by time, outer ones first."""
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    offsets_s = [_offset_s(process, processes[0]) for process in processes]
    begins_s = [
        span.begin_s + offset for process, offset in zip(processes, offsets_s, strict=True) for span in process.spans
    ]
    origin_s = min(begins_s, default=0.0)
    for pid, (process, offset_s) in enumerate(zip(processes, offsets_s, strict=True)):
        tracks = {name: tid for tid, name in enumerate(dict.fromkeys(span.track for span in process.spans))}
        names += _names(pid, process.name, tracks)
        events += [_event(span, pid, tracks[span.track], offset_s - origin_s) for span in process.spans]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}


def _offset_s(process: ProcessSpans, first: ProcessSpans) -> float:
    return 0.0 if process.host == first.host else process.unix_offset_s - first.unix_offset_s


def _names(pid: int, name: str, tracks: dict[str, int]) -> list[dict[str, Any]]:
    def metadata(kind: str, tid: int, **arguments: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}

    return [
        metadata("process_name", 0, name=name),
        metadata("process_sort_index", 0, sort_index=pid),
        *(metadata("thread_name", tid, name=track) for track, tid in tracks.items()),
        *(metadata("thread_sort_index", tid, sort_index=tid) for tid in tracks.values()),
    ]


def _event(span: Span, pid: int, tid: int, offset_s: float) -> dict[str, Any]:
    """Complete event, in microseconds. Begin and end are rounded alike, so that nested spans stay nested."""
    begin_ns, end_ns = (round(1e9 * (value + offset_s)) for value in (span.begin_s, span.end_s))
    event = {
        "ph": "X",
        "name": span.name,
        "pid": pid,
        "tid": tid,
        "ts": begin_ns / 1000,
        "dur": (end_ns - begin_ns) / 1000,
    }
    return event if span.arguments is None else {**event, "args": span.arguments}
