"""Soak test of a server: mixed load for minutes, with disconnects, deadlines and bad requests.

    python -m benchmarks.soak [--model demo] [--minutes 10] [--clients 24] [--output FOLDER] [--option max-num-seqs=8]

The KV cache is small, so that all of its pages are in use when the warm-up ends, and grow memory no more.
Memory of all processes, descriptors, threads and /metrics are sampled every 10 s. At the end: whether memory grew by
more than 2% after the warm-up, which is the first fifth; which errors were not the clients' own; and what still runs or
waits in the server when all clients have left. The exit code is 1 if any of these is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import described, machine, save
from benchmarks.server_process import ServerProcess, Usage, quiet_environment, serve_command
from benchmarks.soak_requests import KINDS, Maker, SoakRequest, metric, name_of
from penstock.bench.serving.http import ConnectionLost, HttpClient, fetch, raise_descriptor_limit
from penstock.bench.serving.load import PreparedRequest, send
from penstock.bench.serving.outcome import Outcome, Status

MOST_GROWTH = 0.02
_WARM_UP_SHARE = 0.2
_REQUEST_TIMEOUT_S = 120.0
_DRAIN_S = 30.0
_SHOWN_FAULTS = 3


@dataclass(frozen=True)
class Sample:
    """Resources at a time. seconds: since the start. running, waiting: requests, of /metrics; None without it."""

    seconds: float
    usage: Usage
    running: float | None
    waiting: float | None


@dataclass
class Findings:
    """Observations of a soak test. ends: of requests, by kind. faults: of the server, by kind."""

    ends: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    samples: list[Sample] = field(default_factory=list)
    # What still runs or waits when all clients have left.
    left: float | None = None

    def add(self, kind: Maker, request: SoakRequest, outcome: Outcome) -> None:
        end = outcome.status.value if outcome.status is not Status.FAILED else outcome.cause
        self.ends[name_of(kind)][end] += 1
        if (fault := request.fault(outcome)) is not None:
            self.faults[name_of(kind)].append(fault)

    def growth(self) -> float | None:
        """Relative growth of memory from the begin to the end of the time after the warm-up; None if that is too short.

        Medians of the first and the last fifth of the samples, since a sample may fall into the load's peak.
        """
        end_s = self.samples[-1].seconds
        memory = [one.usage.memory_bytes for one in self.samples if one.seconds >= _WARM_UP_SHARE * end_s]
        if len(memory) < 4:
            return None
        share = max(len(memory) // 5, 1)
        return statistics.median(memory[-share:]) / statistics.median(memory[:share]) - 1

    def complaints(self) -> list[str]:
        """Return what is wrong, in words."""
        found = [f"{len(faults):,} faults of {kind}" for kind, faults in self.faults.items()]
        growth = self.growth()
        if growth is not None and growth > MOST_GROWTH:
            found.append(f"memory grew by {growth:.1%}")
        if self.left:
            found.append(f"{self.left:g} requests still ran or waited {_DRAIN_S:g} s after the last client had left")
        return found


class Soak:
    """Clients of a server, each of which sends one request after another."""

    def __init__(self, server: ServerProcess, model: str, seed: int) -> None:
        self.findings = Findings()
        self._server = server
        self._model = model
        self._seed = seed
        self._client = HttpClient(server.url, {}, time.perf_counter)
        self._started = time.monotonic()

    async def run(self, seconds: float, num_clients: int, interval_s: float) -> None:
        """Run all clients for some time, and sample meanwhile."""
        until = self._started + seconds
        watch = asyncio.create_task(self._watch(interval_s))
        async with asyncio.TaskGroup() as group:
            for number in range(num_clients):
                group.create_task(self._run_client(random.Random(f"{self._seed}, client {number}"), until))
        watch.cancel()
        self.findings.samples.append(await self._sample())
        self.findings.left = await self._drain()
        self._client.close()

    async def _run_client(self, rng: random.Random, until: float) -> None:
        while time.monotonic() < until:
            (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
            request = kind(rng, self._model)
            self.findings.add(kind, request, await self._send(request))
            await asyncio.sleep(rng.expovariate(10.0))

    async def _send(self, request: SoakRequest) -> Outcome:
        body = request.body if isinstance(request.body, str) else json.dumps(request.body)
        message = self._client.message("POST", request.path, body.encode())
        timeout_s = _REQUEST_TIMEOUT_S if request.leave_after_s is None else request.leave_after_s
        outcome = await send(
            self._client, PreparedRequest(message, None, request.leave_after), time.perf_counter, timeout_s
        )
        if request.leave_after_s is not None and outcome.cause == "timeout":
            outcome.status = Status.DISCONNECTED
        return outcome

    async def _watch(self, interval_s: float) -> None:
        while True:
            self.findings.samples.append(await self._sample())
            await asyncio.sleep(interval_s)

    async def _sample(self) -> Sample:
        running, waiting = await self._load()
        sample = Sample(time.monotonic() - self._started, self._server.usage(), running, waiting)
        print(_line(sample, self.findings), flush=True)
        return sample

    async def _load(self) -> tuple[float | None, float | None]:
        """Requests that run and wait, of /metrics."""
        try:
            response = await fetch(self._client, "GET", "/metrics")
        except (OSError, ConnectionLost) as error:
            self.findings.faults["/metrics"].append(str(error))
            return None, None
        if response.status != 200:
            self.findings.faults["/metrics"].append(f"HTTP {response.status}")
            return None, None
        return metric(response, "num_requests_running"), metric(response, "num_requests_waiting")

    async def _drain(self) -> float | None:
        """Requests that are left when the clients have gone, after waiting for them; None without /metrics."""
        deadline = time.monotonic() + _DRAIN_S
        while True:
            running, waiting = await self._load()
            left = None if running is None else running + (waiting or 0.0)
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.5)


def _line(sample: Sample, findings: Findings) -> str:
    usage = sample.usage
    num_requests = sum(sum(counter.values()) for counter in findings.ends.values())
    num_faults = sum(map(len, findings.faults.values()))
    return (
        f"{sample.seconds:7.0f} s  {usage.memory_bytes / 2**20:8.1f} MiB  {usage.num_processes} processes  "
        f"{usage.num_threads} threads  {usage.num_descriptors} descriptors  {sample.running} running  "
        f"{sample.waiting} waiting  {num_requests:,} requests  {num_faults} faults"
    )


def as_markdown(findings: Findings, facts: dict[str, Any]) -> str:
    """Page with the findings."""
    first, last = findings.samples[0], findings.samples[-1]
    after = [one for one in findings.samples if one.seconds >= _WARM_UP_SHARE * last.seconds]
    growth = findings.growth()
    lines = ["# Soak test of the server, CPU", "", described(facts), ""]
    lines += ["| | at the start | after the warm-up | at the end |", "| --- | ---: | ---: | ---: |"]
    for name, of in _RESOURCES.items():
        lines.append(f"| {name} | {of(first.usage)} | {of(after[0].usage)} | {of(last.usage)} |")
    lines += ["", f"Memory after the warm-up: {'too short to tell' if growth is None else f'{growth:+.2%}'}."]
    lines += [
        f"Requests left in the server at the end: {'unknown' if findings.left is None else f'{findings.left:g}'}."
    ]
    lines += ["", "| requests | ends |", "| --- | --- |"]
    for kind, ends in sorted(findings.ends.items()):
        lines.append(f"| {kind} | {', '.join(f'{end}: {count:,}' for end, count in ends.most_common())} |")
    for kind, faults in findings.faults.items():
        lines += ["", f"{len(faults):,} faults of {kind}, of which the first:"]
        lines += [f"- {' '.join(fault.split())}" for fault in faults[:_SHOWN_FAULTS]]
    return "\n".join(lines) + "\n"


_RESOURCES: dict[str, Callable[[Usage], Any]] = {
    "memory, MiB": lambda usage: f"{usage.memory_bytes / 2**20:.1f}",
    "processes": lambda usage: usage.num_processes,
    "threads": lambda usage: usage.num_threads,
    "descriptors": lambda usage: usage.num_descriptors,
    "CPU, s": lambda usage: f"{usage.processor_s:.0f}",
}


def soak(command: Sequence[str], model: str, log: Path, arguments: argparse.Namespace) -> Findings:
    """Start a server and run the load. model: name in requests. Raises RuntimeError if the server ends."""
    with ServerProcess(list(command), log) as server:
        run = Soak(server, model, arguments.seed)
        asyncio.run(run.run(60 * arguments.minutes, arguments.clients, arguments.interval))
        return run.findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-cache-memory-bytes", default="64MiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", nargs="*", default=[], help="more flags of the server, without their dashes")
    parser.add_argument("--output", type=Path, help="a folder for the page")
    arguments = parser.parse_args()
    quiet_environment()
    raise_descriptor_limit()
    command = serve_command(
        arguments.model,
        f"--threads={arguments.threads}",
        f"--kv-cache-memory-bytes={arguments.kv_cache_memory_bytes}",
        "--served-model-name=measured",
        *(f"--{option}" for option in arguments.option),
    )
    with tempfile.TemporaryDirectory() as folder:
        findings = soak(command, "measured", Path(folder) / "server.log", arguments)
    page = as_markdown(findings, machine(arguments.threads))
    print(page)
    if arguments.output is not None:
        save(arguments.output, "soak", page=page)
    if complaints := findings.complaints():
        sys.exit("; ".join(complaints))


if __name__ == "__main__":
    main()
