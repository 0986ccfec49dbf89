"""Features on a GPU against the same engine on the CPU in float32: the part `features`, one line per case.

    PYTHONPATH=src:. python -m benchmarks.gpu.features [--device cuda] [--only TEXT ...] [--processes 8] [--seconds 200]

Cases (`feature_cases.py`) run in processes side by side. A case that fails is reported with the end of its traceback,
and the rest goes on; a process that dies, hangs or has lost its GPU is replaced. Results are printed as they come, and
summed up at the end.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Time limit of a case, and until a new process has imported what it needs.
_CASE_S, _START_S = 100.0, 120.0
# After these errors a process cannot use its GPU any more.
_LOST = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS", "illegal memory access", "device-side assert", "CUDNN")


@dataclass
class Outcome:
    """note: of a case that passed. error: end of the traceback of one that failed. is_lost: the process too."""

    name: str
    seconds: float
    note: str = ""
    error: str | None = None
    is_lost: bool = False

    @property
    def line(self) -> str:
        if self.error is None:
            return f"ok    {self.seconds:5.1f}s {self.name}{self.note and ': ' + self.note}"
        return f"FAIL  {self.seconds:5.1f}s {self.name}: {self.error.splitlines()[-1][:300]}"


def _work(connection: Connection, device: str, log: str) -> None:
    """Run the cases that a connection names, in a process of its own. log: file of what it writes."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    os.environ["OMP_NUM_THREADS"] = "1"
    from benchmarks.gpu import feature_cases

    cases = feature_cases.cases()
    connection.send("ready")
    while (name := connection.recv()) is not None:
        begin = time.monotonic()
        outcome = Outcome(name, 0.0)
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                outcome.note = cases[name](feature_cases.Bench(Path(folder), device)) or ""
        except BaseException as error:
            text = _short(error)
            outcome.error, outcome.is_lost = text, any(sign in text for sign in _LOST)
        outcome.seconds = time.monotonic() - begin
        connection.send(outcome)


def _short(error: BaseException) -> str:
    """Return the last lines of the traceback of Penstock's code, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "penstock" in frame.filename or "benchmarks" in frame.filename][-3:]
    ours += [frame for frame in frames[-1:] if frame not in ours]
    lines = [f"  {Path(frame.filename).name}:{frame.lineno} {frame.name}: {frame.line}"[:160] for frame in ours]
    cause = error.__cause__
    if cause is not None:
        lines = [*_short(cause).splitlines(), *lines]
    message = " ".join(str(error).split())
    return "\n".join([*lines[-6:], f"{type(error).__name__}: {message[:600]}"])


@dataclass
class _Process:
    """A process and the case that it runs. deadline: of the case, or of its start."""

    device: str
    name: str | None = None
    is_ready: bool = False
    begin: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        descriptor, self._log = tempfile.mkstemp(suffix=".log")
        os.close(descriptor)
        self.process = context.Process(target=_work, args=(theirs, self.device, self._log))
        self.process.start()
        theirs.close()

    @property
    def deadline(self) -> float:
        return self.begin + (_CASE_S if self.is_ready else _START_S)

    @property
    def last_words(self) -> str:
        return " ".join(Path(self._log).read_text(errors="replace")[-500:].split())

    def give(self, name: str) -> None:
        self.name, self.begin = name, time.monotonic()
        self.connection.send(name)

    def end(self) -> None:
        """An idle process ends by itself; another one is killed."""
        if self.is_ready and self.name is None and self.process.is_alive():
            self.connection.send(None)
            self.process.join(3.0)
        self.process.kill()
        self.process.join()
        self.connection.close()
        Path(self._log).unlink(missing_ok=True)


def run(names: list[str], device: str, num_processes: int, deadline: float) -> Iterator[Outcome]:
    """Outcomes in the order in which cases end; those that have not begun at the deadline have none."""
    waiting = names[::-1]
    processes = [_Process(device) for _ in range(min(num_processes, len(names)))]
    try:
        while time.monotonic() < deadline and (waiting or any(one.name for one in processes)):
            wait([one.connection for one in processes], timeout=0.5)
            for index, one in enumerate(processes):
                outcome = _take(one)
                if outcome is not None:
                    yield outcome
                if outcome is not None and outcome.is_lost:
                    one.end()
                    processes[index] = one = _Process(device)
                if one.is_ready and one.name is None and waiting:
                    one.give(waiting.pop())
    finally:
        for one in processes:
            one.end()


def _take(one: _Process) -> Outcome | None:
    """Receive from a process, or find it dead or out of time."""
    try:
        if one.connection.poll():
            received = one.connection.recv()
            if not one.is_ready:
                one.is_ready = True
                return None
            one.name = None if not received.is_lost else one.name
            assert isinstance(received, Outcome)
            return received
    except (EOFError, ConnectionResetError):
        return _lost(one, f"its process ended with {one.process.exitcode}")
    if not one.process.is_alive():
        return _lost(one, f"its process ended with {one.process.exitcode}")
    if (one.name or not one.is_ready) and time.monotonic() > one.deadline:
        return _lost(one, "it took too long")
    return None


def _lost(one: _Process, why: str) -> Outcome:
    name = one.name or "start of a process"
    return Outcome(name, time.monotonic() - one.begin, error=f"{one.last_words}\n{why}", is_lost=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names contain one of these texts")
    parser.add_argument("--skip", nargs="*", default=[], help="no case whose name contains one of these texts")
    parser.add_argument("--processes", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--out", type=Path, help="file of JSON lines, which a summary is appended to")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    from benchmarks.gpu import feature_cases

    names = [
        name
        for name in feature_cases.cases()
        if (not arguments.only or any(text in name for text in arguments.only))
        and not any(text in name for text in arguments.skip)
    ]
    if arguments.list:
        print("\n".join(names))
        return 0
    outcomes = []
    for outcome in run(names, arguments.device, arguments.processes, deadline):
        outcomes.append(outcome)
        print(outcome.line, flush=True)
    failed = [outcome.name for outcome in outcomes if outcome.error is not None]
    begun = {outcome.name for outcome in outcomes}
    missing = [name for name in names if name not in begun]
    summary: dict[str, Any] = {"part": "features", "passed": len(outcomes) - len(failed), "failed": len(failed)}
    summary["not run"] = len(missing)
    if arguments.out is not None:
        with arguments.out.open("a") as file:
            file.write(json.dumps(summary) + "\n")
    print(f"\n{_summed_up(outcomes)}\nnot run: {', '.join(missing)[:500]}\n{json.dumps(summary)}", flush=True)
    return 1 if failed or missing else 0


def _summed_up(outcomes: list[Outcome]) -> str:
    """Cases that failed with the same error together, with the traceback of the first, most first."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            groups.setdefault(outcome.error.splitlines()[-1][:60], []).append(outcome)
    in_order = sorted(groups.values(), key=lambda group: -len(group))
    return "\n".join(
        f"---- {len(group)} failed: {', '.join(one.name for one in group)[:500]}\n{group[0].error}"
        for group in in_order
    )


if __name__ == "__main__":
    sys.exit(main())
