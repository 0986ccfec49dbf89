"""Profiles of steps (`profiler="steps"`): one trace of the core's phases and of every rank."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.errors import ConfigError, LifecycleError
from support.engines import SMALL


def started(traces: Path, **options: Any) -> LLM:
    return LLM("demo", profiler="steps", profiler_dir=traces, profiler_use_gzip=False, **{**SMALL, **options})


def profiled(llm: LLM, max_tokens: int, prefix: str | None = None) -> tuple[Path, list[dict[str, Any]]]:
    llm.start_profile(prefix)
    prompts = [{"prompt_token_ids": [1, 2, 3 + number]} for number in range(3)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True), use_tqdm=False)
    (path,) = llm.stop_profile()
    events: list[dict[str, Any]] = json.loads(Path(path).read_text())["traceEvents"]
    return Path(path), events


def by_track(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Complete events by the names of their process and track."""
    names = {
        (event["name"], event["pid"], event["tid"] if event["name"] == "thread_name" else 0): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and "name" in event["args"]
    }
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            pid, tid = event["pid"], event["tid"]
            found[names["process_name", pid, 0], names["thread_name", pid, tid]].append(event)
    return found


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Events of a track in the order of time either follow each other or lie within each other."""
    open_until: list[float] = []
    for event in events:
        begin, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= begin + 1e-6:
            open_until.pop()
        assert event["dur"] >= 0
        assert not open_until or end <= open_until[-1] + 1e-6, f"{event} overlaps the end of another one"
        open_until.append(end)


def check_trace(events: list[dict[str, Any]], ranks: list[str], num_steps: int) -> None:
    tracks = by_track(events)
    times = [event["ts"] for event in events if event["ph"] == "X"]
    assert times == sorted(times)
    assert set(tracks) == {("engine core", "phases")} | {
        (rank, track) for rank in ranks for track in ("steps", "executables")
    }
    for shown in tracks.values():
        check_nesting(shown)
    core = {event["name"] for event in tracks["engine core", "phases"]}
    assert {"schedule", "execute", "sample", "wait", "update"} <= core
    for rank in ranks:
        names = [event["name"] for event in tracks[rank, "steps"]]
        steps = [event for event in tracks[rank, "steps"] if event["name"].startswith("execute_context_")]
        assert [len(steps), names.count("execute"), names.count("sample")] == [num_steps] * 3
        assert names.count("prepare") == num_steps
        assert len({event["args"]["step"] for event in steps}) == num_steps
        assert len(tracks[rank, "executables"]) == num_steps


def test_a_trace_has_the_phases_of_core_and_rank(tmp_path: Path) -> None:
    with started(tmp_path / "traces") as llm:
        path, events = profiled(llm, max_tokens=5, prefix="mine")
        assert path.parent == tmp_path / "traces"
        assert path.name.startswith("mine_steps.")
        check_trace(events, ["rank 0 (pp0 tp0)"], num_steps=5)
        _, again = profiled(llm, max_tokens=2)
        check_trace(again, ["rank 0 (pp0 tp0)"], num_steps=2)


def test_calls_out_of_order_and_bad_names_are_refused(tmp_path: Path) -> None:
    with started(tmp_path) as llm:
        with pytest.raises(LifecycleError, match="No profile is running"):
            llm.stop_profile()
        with pytest.raises(ConfigError, match="profile_prefix='a/b' is not valid"):
            llm.start_profile("a/b")
        llm.start_profile()
        with pytest.raises(LifecycleError, match="A profile is running already"):
            llm.start_profile()
    with LLM("demo", profiler="steps", **SMALL) as llm, pytest.raises(ConfigError, match="profiler_dir is not set"):
        llm.start_profile()


@pytest.mark.slow
def test_every_rank_has_tracks(tmp_path: Path) -> None:
    with started(tmp_path, tensor_parallel_size=2) as llm:
        _, events = profiled(llm, max_tokens=4)
    check_trace(events, ["rank 0 (pp0 tp0)", "rank 1 (pp0 tp1)"], num_steps=4)
