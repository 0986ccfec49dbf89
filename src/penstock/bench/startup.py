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

_STAGES = ("python", "imports", "engine", "first token")


def measure(model: str, options: dict[str, Any], prompts: Prompts, settings: Settings, tick: Tick) -> dict[str, Any]:
    """Start a process for each run. Raises EngineDead with its last output if one fails."""
    input_len = settings.input_len
    assert input_len is not None
    runs = repeat(settings, tick, lambda: _start(model, options, prompts.one(input_len)))
    totals = [sum(stages.values()) for stages in runs]
    return {
        "seconds": totals,
        "startup_s": summary(totals),
        "stages_s": {stage: summary([stages[stage] for stages in runs]) for stage in _STAGES},
    }


def _start(model: str, options: dict[str, Any], prompt: list[int]) -> dict[str, float]:
    arguments = json.dumps({"model": model, "options": options, "prompt": prompt})
    begin = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "penstock.bench.first_token", arguments], capture_output=True, text=True
    )
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise EngineDead(f"A fresh process came to no first token: {lines[-1]}")
    moments = json.loads(result.stdout.splitlines()[-1])
    if "error" in moments:
        raise EngineDead(f"A fresh process came to no first token: {moments['error']}")
    ends = [moments["started"], moments["imported"], moments["loaded"], moments["first_token"]]
    return {stage: end - start for stage, start, end in zip(_STAGES, [begin, *ends], ends, strict=False)}
