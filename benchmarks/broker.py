"""Overhead of a broker between front ends and cores, relative to a core in a process of its own, in turns.

    python -m benchmarks.broker [--streams 32 1] [--tokens 256] [--rounds 15]

Time of a step (a token of every stream) and to the first token; medians, spread, and differences.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.core_process import OPTIONS, stream
from penstock import AsyncEngine
from penstock.config import EngineConfig
from penstock.config.queue import QueueLimits
from penstock.engine.messages import CoreMessage
from penstock.engine.processes.broker import BrokerArguments, serve_fronts
from penstock.engine.processes.broker_connection import BrokerState, connect_to_broker
from penstock.engine.processes.child_process import ChildProcess
from penstock.executor.processes import ProcessStarter


def start_broker(config: EngineConfig, folder: str, starter: ProcessStarter) -> tuple[ChildProcess, socket.socket]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(Path(folder) / "broker"))
    listener.listen()
    arguments = BrokerArguments(config, QueueLimits(), listener.fileno())
    process = ChildProcess(
        serve_fronts,
        arguments,
        starter,
        _ignore,
        role="broker",
        send_timeout_s=10.0,
        descriptors=[listener.fileno()],
    )
    return process, listener


def _ignore(process: ChildProcess, message: CoreMessage | None) -> None:
    """Take no notice of heartbeats."""


async def compare(engines: dict[str, AsyncEngine], num_streams: int, num_tokens: int, num_rounds: int) -> None:
    steps: dict[str, list[float]] = {way: [] for way in engines}
    firsts: dict[str, list[float]] = {way: [] for way in engines}
    for number in range(num_rounds + 1):
        for way, engine in engines.items():
            begin = time.monotonic()
            first = await asyncio.gather(*(stream(engine, index, num_tokens) for index in range(num_streams)))
            # The first round warms up.
            if number:
                steps[way].append((time.monotonic() - begin) / num_tokens * 1e3)
                firsts[way].append(statistics.median(first) * 1e3)
    for what, found in (("step", steps), ("first token", firsts)):
        medians = {way: statistics.median(values) for way, values in found.items()}
        spread = {way: f"{min(values):.3f} to {max(values):.3f}" for way, values in found.items()}
        lines = ", ".join(f"{way} {medians[way]:.3f} ms ({spread[way]})" for way in found)
        differences = [other - one for one, other in zip(*found.values(), strict=True)]
        print(f"{num_streams} streams, {what}: {lines}; median difference {statistics.median(differences):+.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 1])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    config = EngineConfig.create("demo", **OPTIONS)
    starter = ProcessStarter()
    with tempfile.TemporaryDirectory() as folder:
        process, listener = start_broker(config, folder, starter)
        path = str(Path(folder) / "broker")
        engines: dict[str, Any] = {
            "core process": AsyncEngine.from_config(config),
            "broker": AsyncEngine.from_config(config, lambda config: connect_to_broker(path, config, BrokerState())),
        }
        try:
            for num_streams in arguments.streams:
                asyncio.run(compare(engines, num_streams, arguments.tokens, arguments.rounds))
        finally:
            for engine in engines.values():
                engine.shutdown()
            process.close()
            listener.close()
            starter.close()


if __name__ == "__main__":
    main()
