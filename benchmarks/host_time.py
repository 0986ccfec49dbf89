"""Host time of a decode step, part by part, outside the model's forward pass.

    python -m benchmarks.host_time [--model demo] [--batch-sizes 32] [--steps 300] [--threads 2] [--output FOLDER]

Each part is timed by wrapping its one method. "Outside the model" counts everything between the
request's tokens being scheduled and its new text being ready, except the model's forward pass and its logits; it comes
from a run of its own in which nothing else is timed, since a clock costs several microseconds in the place where it is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import described, machine, save
from penstock.config import EngineConfig
from penstock.contract import RpcCall, SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.session import Session
from penstock.kernels.native.program import BoundChoices
from penstock.runner.model_runner import ModelRunner

# Prefills, and a few steps for caches to settle.
_SKIPPED_STEPS = 20
_MODEL = ("model forward", "logits")
_WHOLE = "whole step"
_OUTSIDE = "outside the model"
_SHARE = "share of the step"


@dataclass(frozen=True)
class Case:
    """One column of the table."""

    model: str
    num_requests: int
    steps: int
    threads: int
    temperature: float

    @property
    def title(self) -> str:
        sampling = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        return f"{self.num_requests} requests, {sampling}"


class PartClock:
    """Seconds of each part, step by step. now: clock."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.steps: list[dict[str, float]] = []
        self._current: dict[str, float] = defaultdict(float)
        self._wrapped: list[tuple[Any, str, Callable[..., Any]]] = []

    def wrap_method_of_class(self, instance: Any, method: str, part: str) -> None:
        """`wrap` where the method is defined: a model with a method of its own no longer runs as a program."""
        self.wrap(next(base for base in type(instance).__mro__ if method in vars(base)), method, part)

    def unwrap(self) -> None:
        """Restore the wrapped methods."""
        while self._wrapped:
            setattr(*self._wrapped.pop())

    def wrap(self, owner: Any, method: str, part: str, *, ends_step: bool = False) -> None:
        """Time every call of a method under the part's name."""
        original: Callable[..., Any] = getattr(owner, method)
        self._wrapped.append((owner, method, original))

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            try:
                return original(*args, **kwargs)
            finally:
                self._current[part] += self._now() - begin
                if ends_step:
                    self.steps.append(dict(self._current))
                    self._current.clear()

        setattr(owner, method, timed)


def measure(case: Case) -> dict[str, float]:
    """Median microseconds per decode step of each part; and the share of the time outside the model."""
    parts = _medians(_run(case, _wrap_parts))
    named = sum(value for part, value in parts.items() if part not in (*_MODEL, _WHOLE))
    whole = _run(case, _wrap_model)
    outside = [step[_WHOLE] - sum(step.get(part, 0.0) for part in _MODEL) for step in whole]
    parts[_WHOLE] = statistics.median(step[_WHOLE] for step in whole) * 1e6
    parts[_OUTSIDE] = statistics.median(outside) * 1e6
    parts["of which not in a part above"] = parts[_OUTSIDE] - named
    parts[_SHARE] = parts[_OUTSIDE] / parts[_WHOLE]
    return parts


def _run(case: Case, wrap: Callable[[Session, PartClock], None]) -> list[dict[str, float]]:
    """Seconds of each part that `wrap` has timed, step by step."""
    session = Session(
        EngineConfig.create(case.model, num_threads=case.threads, max_num_seqs=case.num_requests, device="cpu")
    )
    max_tokens = case.steps + 2 * _SKIPPED_STEPS
    params = SamplingParams(temperature=case.temperature, max_tokens=max_tokens, ignore_eos=True, seed=1)
    requests = [session.accept(f"ROMEO {index}:\n", params) for index in range(case.num_requests)]
    clock = PartClock()
    wrap(session, clock)
    with closing(session.run(requests)) as progress:
        for _ in progress:
            if len(clock.steps) > case.steps + _SKIPPED_STEPS:
                break
    session.close()
    clock.unwrap()
    return clock.steps[_SKIPPED_STEPS:]


def _wrap_parts(session: Session, clock: PartClock) -> None:
    core, runner = parts_of(session)
    clock.wrap(core.scheduler, "schedule", "schedule")
    clock.wrap(runner.frames, "begin", "inputs")
    clock.wrap(runner.frames, "fill", "inputs")
    _wrap_model(session, clock)
    clock.wrap(runner.sampler, "sample", "sampling")
    clock.wrap(core.scheduler, "update_from_output", "scheduler update")
    clock.wrap(session._dispatcher._processor, "process", "detokenise and outputs")


def _wrap_model(session: Session, clock: PartClock) -> None:
    _, runner = parts_of(session)
    clock.wrap(runner.execution.programs, "run", "model forward")
    clock.wrap_method_of_class(runner.model, "compute_logits", "logits")
    clock.wrap_method_of_class(runner.model, "compute_greedy", "logits")
    # Forward pass and logits in one call.
    clock.wrap(BoundChoices, "run", "model forward")
    clock.wrap(session, "_turn", _WHOLE, ends_step=True)


def parts_of(session: Session) -> tuple[EngineCore, ModelRunner]:
    core = session._core
    assert isinstance(core, EngineCore)
    (runner,) = core.collective_rpc(RpcCall(lambda worker: worker.runner))
    return core, runner


def _medians(steps: list[dict[str, float]]) -> dict[str, float]:
    return {part: statistics.median(step.get(part, 0.0) for step in steps) * 1e6 for part in steps[0]}


def as_markdown(report: dict[str, Any]) -> str:
    lines = [f"# Host time per step, model {report['model']}", ""]
    lines += [described(report["machine"]), ""]
    lines += ["| part | " + " | ".join(report["runs"]) + " |", "| --- |" + " ---: |" * len(report["runs"])]
    runs = report["runs"].values()
    # A greedy run may have no part of its own for sampling: the head's product chooses.
    for part in max(runs, key=len):
        cells = [_cell(part, run[part]) if part in run else "in the logits" for run in runs]
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(part: str, value: float) -> str:
    return f"{100 * value:.1f}%" if part == _SHARE else f"{value:.0f} µs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cases = [
        Case(arguments.model, num_requests, arguments.steps, arguments.threads, temperature)
        for num_requests in arguments.batch_sizes
        for temperature in arguments.temperatures
    ]
    runs = {case.title: measure(case) for case in cases}
    report = {"model": Path(arguments.model).name, "machine": machine(arguments.threads), "runs": runs}
    print(as_markdown(report))
    if arguments.output is not None:
        save(arguments.output, "host-time", report=report, page=as_markdown(report))


if __name__ == "__main__":
    main()
