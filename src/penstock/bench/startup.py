"""Benchmark of start-up: seconds from a process's start to its first token."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from penstock.bench.runs import Prompts, Tick, repeat
from penstock.bench.statistics import summary
from penstock.bench.workloads import Settings
from penstock.errors import EngineDead

_PHASES = ("python", "imports", "engine", "first token")


def measure(model: str, options: dict[str, Any], prompts: Prompts, settings: Settings, tick: Tick) -> dict[str, Any]:
    """Start a process for each run. Raises EngineDead with its last output if one fails."""
    input_len = settings.input_len
    assert input_len is not None
    runs = repeat(settings, tick, lambda: _start(model, options, prompts.one(input_len)))
    totals = [sum(phases.values()) for phases in runs]
    return {
        "seconds": totals,
        "startup_s": summary(totals),
        "phases_s": {phase: summary([phases[phase] for phases in runs]) for phase in _PHASES},
    }


def _start(model: str, options: dict[str, Any], prompt: list[int]) -> dict[str, float]:
    arguments = json.dumps({"model": model, "options": options, "prompt": prompt})
    begin = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "penstock.bench.first_token", arguments], capture_output=True, text=True
    )
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise EngineDead(f"A fresh process generated no first token: {lines[-1]}")
    moments = json.loads(result.stdout.splitlines()[-1])
    if "error" in moments:
        raise EngineDead(f"A fresh process generated no first token: {moments['error']}")
    ends = [moments["started"], moments["imported"], moments["loaded"], moments["first_token"]]
    return {phase: end - start for phase, start, end in zip(_PHASES, [begin, *ends], ends, strict=False)}
