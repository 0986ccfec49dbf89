"""Comparison of checkouts of Penstock, in turns: the speed-up of a change.

    python -m benchmarks.compare BEFORE AFTER [--repeats 5] [--workloads decode throughput] [--engines penstock-int8]

A checkout is a folder with `src/penstock`, its C++ kernels built or not. Each runs in a process of its own, started by
the Python that runs this, and takes the model and the workloads from here. Ratios are medians of the ratios of turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.first_character import first_character as start_to_first_character
from benchmarks.machine import described, machine, save
from benchmarks.peers.catalogue import ENGINES, REFERENCE, EngineSpec
from benchmarks.peers.checkpoints import make
from benchmarks.peers.shapes import SHAPES
from benchmarks.workloads import Workload, make_workloads

_STARTUP = "startup"
_HERE = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    names = [workload.name for workload in make_workloads()] + [_STARTUP]
    parser.add_argument("--workloads", nargs="*", choices=names, default=names)
    ours = [engine.name for engine in ENGINES.values() if engine.environment is None]
    parser.add_argument("--engines", nargs="*", choices=ours, default=[REFERENCE])
    parser.add_argument("--output", type=Path, help="a folder for the table")
    arguments = parser.parse_args()
    checkouts = [checkout.resolve() for checkout in arguments.checkouts]
    for checkout in checkouts:
        # Python would take the installed package instead.
        if not (checkout / "src" / "penstock").is_dir():
            parser.error(f"{checkout} is no checkout of Penstock: it has no folder src/penstock")
    table = Table(checkouts, machine(arguments.threads))
    workloads = [workload for workload in make_workloads() if workload.name in arguments.workloads]
    with tempfile.TemporaryDirectory() as folder:
        for engine in (ENGINES[name] for name in arguments.engines if workloads):
            model = make(Path(folder), SHAPES["llama-60m"], engine.model_format)
            processes = [EngineOf(checkout, engine, model, arguments.threads) for checkout in checkouts]
            for workload in workloads:
                table.add(engine.title, workload, measure(processes, workload, arguments.repeats))
            for process in processes:
                process.close()
    if _STARTUP in arguments.workloads:
        turns = [[first_character(checkout) for checkout in checkouts] for _ in range(arguments.repeats)]
        table.add("`penstock generate`", None, turns)
    print(table.as_markdown())
    if arguments.output is not None:
        save(arguments.output, "compare", page=table.as_markdown())


class EngineOf:
    """Engine of a checkout, in a process of its own that waits between runs."""

    def __init__(self, checkout: Path, engine: EngineSpec, model: Path, threads: int) -> None:
        self.checkout = checkout
        options = json.dumps({"num_threads": threads, **engine.options})
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from benchmarks.compare import serve; serve()", model, options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(checkout) | engine.variables,
            cwd=_HERE,
            text=True,
        )
        self._read_line()  # when it is ready

    def run(self, workload: Workload) -> tuple[list[list[int]], float]:
        assert self._process.stdin is not None
        self._process.stdin.write(workload.name + "\n")
        self._process.stdin.flush()
        tokens, seconds = json.loads(self._read_line())
        return tokens, seconds

    def close(self) -> None:
        self._process.communicate()

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"The engine of {self.checkout} has ended; its messages are above.")
        return line


def serve() -> None:
    """Serve in a checkout's process: print a line when ready, then one of JSON for every workload's name."""
    from penstock.config import EngineConfig
    from penstock.engine.core.engine_core import EngineCore

    core = EngineCore(EngineConfig.create(sys.argv[1], device="cpu", **json.loads(sys.argv[2])))
    workloads = {workload.name: workload for workload in make_workloads()}
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(_run(core, workloads[line.strip()], number)), flush=True)
    core.close()


def _run(core: Any, workload: Workload, number: int) -> tuple[list[list[int]], float]:
    """Tokens of each request, and seconds of the run; without cached prefixes."""
    from penstock.contract import SamplingParams
    from penstock.engine.messages import EngineRequest

    core.step()
    assert core.reset_prefix_cache()
    tokens: dict[str, list[int]] = {}
    begin = time.perf_counter()
    for index, (prompt, num_outputs) in enumerate(zip(workload.prompts, workload.num_outputs, strict=True)):
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=num_outputs, ignore_eos=True)
        req_id = f"{number}-{index}"
        core.add_request(EngineRequest(req_id=req_id, prompt_token_ids=prompt, sampling_params=params))
        tokens[req_id] = []
    while core.has_unfinished_requests():
        for output in core.step():
            tokens[output.req_id] += output.new_token_ids
    return list(tokens.values()), time.perf_counter() - begin


def measure(engines: list[EngineOf], workload: Workload, repeats: int) -> list[list[float]]:
    """Seconds by turn and engine, which begin alternately; a first turn is not counted."""
    tokens = [engine.run(workload)[0] for engine in engines]
    for engine, theirs in zip(engines, tokens, strict=True):
        if theirs != tokens[0]:
            print(f"{workload.name}: {engine.checkout} gives other tokens than {engines[0].checkout}", file=sys.stderr)
    turns = []
    for turn in range(repeats):
        seconds = {}
        for engine in engines if turn % 2 == 0 else reversed(engines):
            seconds[engine] = engine.run(workload)[1]
        turns.append([seconds[engine] for engine in engines])
    return turns


def first_character(checkout: Path) -> float:
    """Seconds from the start of `penstock generate` to its first character."""
    try:
        return start_to_first_character(_environment(checkout))[0]
    except RuntimeError as error:
        raise SystemExit(f"{checkout}: {error}") from error


def _environment(checkout: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout / "src"), str(_HERE)])}
    # Else every start compiles all sources, and the larger checkout is the slower one.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


class Table:
    """Table of figures by engine, workload and checkout."""

    def __init__(self, checkouts: list[Path], facts: dict[str, Any]) -> None:
        self._names = [checkout.name for checkout in checkouts]
        self._lines = [
            "# Checkouts of Penstock, CPU, random-weight Llama of 60 million parameters",
            "",
            described(facts),
            "",
            f"| engine | workload | checkout | median | spread | relative to {self._names[0]} |",
            "| --- | --- | --- | ---: | ---: | ---: |",
        ]

    def add(self, engine: str, workload: Workload | None, turns: list[list[float]]) -> None:
        """workload: None for the startup. turns: seconds by turn and checkout."""
        for number, name in enumerate(self._names):
            seconds = [turn[number] for turn in turns]
            median = statistics.median(seconds)
            figure = f"{workload.num_units / median:.0f} {workload.unit}" if workload else f"{median:.2f} s"
            title = workload.title if workload else "process start to first character"
            spread = 100 * (max(seconds) - min(seconds)) / median
            ratio = f"{statistics.median(turn[0] / turn[number] for turn in turns):.2f} × as fast" if number else ""
            self._lines.append(f"| {engine} | {title} | {name} | {figure} | {spread:.0f}% | {ratio} |")

    def as_markdown(self) -> str:
        return "\n".join(self._lines) + "\n"


if __name__ == "__main__":
    main()
