"""Host time of a step behind a GPU, part by part, measured on a CPU.

    python -m benchmarks.gpu.host [--batch-sizes 1 64 256] [--temperatures 0 1] [--turnover 0 3] [--device-ms 0]
        [--output FOLDER]

A device that computes nothing replays empty graphs, and scheduling is asynchronous. So all that is left of a step is
the host's work, which is hidden as long as the GPU's step is longer. It does not depend on the model's layers, which a
graph launches as one call. Launches of kernels outside the graph are not counted. With `--turnover N` a request ends in
every Nth step, and another one takes its place: its prefill is a step of its own kind, and decodes begin anew after it.
With `--device-ms` each step's results come so much later than those of the step before, and the host sleeps meanwhile:
then its caches are cold. Times are processor times of the thread, so that other processes count less.

"prepare inputs" has what the runner does before the launch; "outputs" the requests' new tokens and metrics, as `LLM`
takes them in the core's thread. A server does the latter in another process, and the core encodes its message instead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.parts import Engine
from benchmarks.gpu.shapes import SHAPES
from benchmarks.host_time import PartClock
from benchmarks.machine import described, machine, save
from penstock.attention.reference import ReferenceBackend
from penstock.attention.select import BACKENDS
from penstock.config import EngineConfig
from penstock.contract import RpcCall, SamplingParams
from penstock.device.base import PendingCopy
from penstock.device.cpu import CpuDevice, HostCopy
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.dispatcher import Dispatcher
from penstock.engine.messages import EngineRequest
from penstock.engine.output.output_processor import OutputProcessor
from penstock.engine.output.progress import Progress
from penstock.engine.statistics.metrics import EngineMetrics
from penstock.kernels.bound_step import BoundStep, LayoutTensors, SlotTensors, StepOutcome, StepTensors
from penstock.kernels.sampling import ChosenTokens
from penstock.runner import async_output
from penstock.runner.execute.graphs import GraphExecution
from penstock.runner.sampling.sampler import SamplerOutput
from penstock.step.frame import Frame
from penstock.text.tokenizer import load_tokenizer

_SKIPPED_STEPS = 40
_SHORTEST_PROMPT = 8
_WHOLE, _WAIT, _INPUTS, _READ = "whole step", "wait", "prepare inputs", "read the results"


class LateCopy(HostCopy):
    """A copy that is done at some time."""

    def __init__(self, tensors: Sequence[Tensor], done_at: float) -> None:
        super().__init__(tensors)
        self._done_at = done_at

    def is_done(self) -> bool:
        return time.perf_counter() >= self._done_at


class EmptyDevice(CpuDevice):
    """A device that runs beside the host: a replay computes nothing, and a step takes `step_s`."""

    overlaps_with_host = True
    captures_graphs = True

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return lambda: None

    def __init__(self, step_s: float) -> None:
        super().__init__(1)
        self._step_s = step_s
        self._is_free_at = 0.0

    def download(self, tensors: Sequence[Tensor]) -> PendingCopy:
        self._is_free_at = max(self._is_free_at, time.perf_counter()) + self._step_s
        return LateCopy(tensors, self._is_free_at)


class CapturableBackend(ReferenceBackend):
    """The reference backend, whose captured steps are never run."""

    name = "capturable"
    keeps_metadata = True
    is_capturable = True


class EmptyStep(BoundStep):
    """Gathers nothing, and every request's token is the same."""

    def __init__(self, state: SlotTensors, layout: LayoutTensors, buffers: StepTensors) -> None:
        self._sizes = len(layout.token_to_req_T), len(layout.idx_mapping_R)
        self._buffers = buffers
        self._parts: dict[tuple[int, ...], StepTensors] = {}
        self._outcome = _outcome_of(layout.num_reqs)

    def gather(self, num_columns: tuple[int, ...]) -> StepTensors:
        if num_columns not in self._parts:
            self._parts[num_columns] = self._buffers.part(*self._sizes, num_columns)
        return self._parts[num_columns]

    def outcome(self, sampled_token_ids_L: Tensor, failures_L: Tensor) -> tuple[StepOutcome, None]:
        return self._outcome, None

    def advance(self, outcome: StepOutcome) -> None:
        pass


@cache
def _outcome_of(num_reqs: int) -> StepOutcome:
    # Token, number of tokens, rejected drafts, failure.
    return StepOutcome(torch.tensor([[7, 1, 0, 0]]).repeat(num_reqs, 1))


def _sample_nothing(*_: Any) -> SamplerOutput:
    return SamplerOutput(*_NOTHING, None, {})


_NOTHING = ChosenTokens(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool))


@dataclass(frozen=True)
class Case:
    """One column of the table.

    spread: lengths of prompts differ, so that each step has requests at a block's end. turnover: steps from one
    request's end to the next one's; 0 for none.
    """

    num_reqs: int
    temperature: float
    num_steps: int
    device_ms: float
    spread: bool
    turnover: int

    @property
    def title(self) -> str:
        sampling = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        turnover = f", one ends in {self.turnover} steps" if self.turnover else ""
        device = f", {self.device_ms:g} ms of the device" if self.device_ms else ""
        return f"{self.num_reqs} requests, {sampling}{turnover}{device}"

    @property
    def all_steps(self) -> int:
        return 2 * (self.num_steps + _SKIPPED_STEPS)


class Load:
    """Requests of one case: a fixed number, each of which is replaced when it ends."""

    def __init__(self, case: Case, core: EngineCore) -> None:
        self._case = case
        processor = OutputProcessor(
            load_tokenizer(EngineConfig.create("demo").model.tokenizer_folder),
            EngineMetrics("tiny", has_prefix_cache=True),
        )
        self.dispatcher = Dispatcher(core, processor)
        self.processor = processor
        self._inbox: deque[Progress] = deque()
        self._num_added = 0
        for number in range(case.num_reqs):
            self._add(1 + (number + 1) * case.turnover if case.turnover else case.all_steps)

    def step(self) -> None:
        self.dispatcher.step()
        ended = sum(progress.finished for progress in self._inbox)
        self._inbox.clear()
        for _ in range(ended):
            self._add(self._case.num_reqs * self._case.turnover)

    def _add(self, max_tokens: int) -> None:
        case, number = self._case, self._num_added
        self._num_added += 1
        params = SamplingParams(temperature=case.temperature, seed=0, max_tokens=max_tokens, ignore_eos=True)
        prompt = [3 + number % 500] * (_SHORTEST_PROMPT + number % 16 * case.spread)
        request = EngineRequest(req_id=f"r{number}", prompt_token_ids=prompt, sampling_params=params)
        self.dispatcher.admit(request, None, self._inbox)


def measure(case: Case) -> dict[str, tuple[float, float, float]]:
    """Minimum, median and mean microseconds per step of each part, and of the step with no clock inside."""
    replacements = {
        "penstock.worker.worker.create_device": lambda *_, **__: EmptyDevice(case.device_ms / 1e3),
        "penstock.runner.build.batch_builder.bind_step": EmptyStep,
        "penstock.runner.sampling.sampler.Sampler._sample": _sample_nothing,
    }
    with ExitStack() as patches, torch.no_grad():
        patches.enter_context(patch.dict(BACKENDS, {CapturableBackend.name: CapturableBackend}))
        for name, replacement in replacements.items():
            patches.enter_context(patch(name, replacement))
        engine = Engine(
            SHAPES["tiny"],
            attention_backend=CapturableBackend.name,
            max_num_seqs=case.num_reqs,
            # All prompts in one step.
            max_num_batched_tokens=max(64, 32 * case.num_reqs),
            max_model_len=case.all_steps + 64,
            kv_cache_memory_bytes=case.num_reqs * (case.all_steps + 64) * 4096,
        )
        (runner,) = engine.core.collective_rpc(RpcCall(lambda worker: worker.runner))
        patches.enter_context(patch.object(type(runner.model), "compute_logits", lambda _, hidden, _context: hidden))
        load = Load(case, engine.core)
        for _ in range(_SKIPPED_STEPS):
            load.step()
        if case.turnover:
            patches.enter_context(patch.object(GraphExecution, "run", _run_nothing))
        num_replays = runner.execution.num_replays
        whole = _seconds_of_parts(engine, load, case.num_steps, in_parts=False)
        if not case.turnover:
            assert runner.execution.num_replays == num_replays + case.num_steps, "steps ran without graphs"
        parts = _seconds_of_parts(engine, load, case.num_steps, in_parts=True)
        engine.core.close()
    return {
        part: (min(seconds) * 1e6, statistics.median(seconds) * 1e6, statistics.fmean(seconds) * 1e6)
        for part, seconds in (whole | parts).items()
    }


def _run_nothing(_: GraphExecution, frame: Frame) -> str:
    """Launch the forward pass of a step that fits no graph."""
    frame.aux, frame.all_hidden, frame.hidden, frame.chosen = {}, None, None, _NOTHING
    return "nothing"


def _seconds_of_parts(engine: Engine, load: Load, num_steps: int, *, in_parts: bool) -> dict[str, list[float]]:
    """Seconds of each step without its waits, as a whole or in parts."""
    core, clock = engine.core, PartClock(time.thread_time)
    clock.wrap(async_output, "wait_until", _WAIT)
    if in_parts:
        executor = core._executor
        clock.wrap(core.scheduler, "schedule", "schedule")
        clock.wrap(executor, "execute_model", _INPUTS)
        clock.wrap(Frame, "run", "launch")
        clock.wrap(executor, "sample_tokens", "sample")
        clock.wrap(type(core._in_flight[0][1]), "get_output", _READ)
        clock.wrap(core.scheduler, "update_from_output", "update the scheduler")
        clock.wrap(load.processor, "process", "outputs")
    clock.wrap(load.dispatcher, "step", _WHOLE, ends_step=True)
    for _ in range(num_steps):
        load.step()
    clock.unwrap()
    for step in clock.steps:
        waited = step.pop(_WAIT, 0.0)
        step[_WHOLE] -= waited
        if in_parts:
            step[_READ] -= waited
            step[_INPUTS] -= step["launch"]
            step["rest"] = 2 * step[_WHOLE] - sum(step.values())
            del step[_WHOLE]
    return {part: [step.get(part, 0.0) for step in clock.steps] for part in clock.steps[0]}


def as_markdown(report: dict[str, Any]) -> str:
    runs = report["runs"]
    lines = [
        "# Host time per decode step behind a GPU: minimum, median and mean, µs",
        "",
        described(report["machine"]),
        "",
    ]
    lines += ["| part | " + " | ".join(runs) + " |", "| --- |" + " ---: |" * len(runs)]
    for part in next(iter(runs.values())):
        cells = ["{:.0f}, {:.0f}, {:.0f}".format(*run[part]) for run in runs.values()]
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--turnover", type=int, nargs="+", default=[0])
    parser.add_argument("--device-ms", type=float, default=0.0)
    parser.add_argument("--equal-lengths", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cases = [
        Case(num_reqs, temperature, arguments.steps, arguments.device_ms, not arguments.equal_lengths, turnover)
        for num_reqs in arguments.batch_sizes
        for turnover in arguments.turnover
        for temperature in arguments.temperatures
    ]
    runs = {case.title: measure(case) for case in cases}
    report = {"machine": machine(1), "runs": runs}
    print(as_markdown(report))
    if arguments.output is not None:
        save(arguments.output, "gpu-host-time", report=report, page=as_markdown(report))


if __name__ == "__main__":
    main()
