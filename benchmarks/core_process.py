"""Overhead of a core in a process of its own for an `AsyncEngine`, relative to one in the same process, in turns.

    python -m benchmarks.core_process [--streams 32 1] [--tokens 256] [--rounds 15] [--starts 3] [--threads 2]

Starts: seconds from an empty interpreter to the engine, and to its first token; memory of the process then. Streams:
time of a step (a token of every stream), to the first token, and CPU time by process. Medians, and a ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil

from penstock import AsyncEngine, RequestOutputKind, SamplingParams

WAYS = {"in the program": False, "in a process": True}
OPTIONS: dict[str, Any] = {"max_num_seqs": 64, "kv_cache_memory_bytes": "256MiB", "device": "cpu"}
START = """
import asyncio, json, os, sys, time
begin = time.monotonic()
import psutil
from penstock import AsyncEngine, SamplingParams
async def main(options):
    async with AsyncEngine("demo", **options) as engine:
        started = time.monotonic() - begin
        await anext(engine.generate("ROMEO:", SamplingParams(max_tokens=4)))
        first = time.monotonic() - begin
        print(json.dumps([started, first, psutil.Process().memory_info().rss / 2**20]))
asyncio.run(main(json.loads(sys.argv[1])))
"""


def start(is_elsewhere: bool) -> list[float]:
    """Seconds to the engine and to its first token, and MiB of the process."""
    options = json.dumps({**OPTIONS, "enable_multiprocessing": is_elsewhere})
    environment = {**os.environ, "PENSTOCK_LOG_LEVEL": "error"}
    command = [sys.executable, "-c", START, options]
    found: list[float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout)
    return found


async def stream(engine: AsyncEngine, index: int, num_tokens: int) -> float:
    """Seconds to its first token."""
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    begin, first_s = time.monotonic(), 0.0
    async for _ in engine.generate({"prompt_token_ids": [5 + index] * (16 + index)}, params):
        first_s = first_s or time.monotonic() - begin
    return first_s


def processor_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


async def compare_streams(num_streams: int, num_tokens: int, num_rounds: int, num_threads: int | None) -> None:
    engines = {
        way: AsyncEngine("demo", enable_multiprocessing=is_elsewhere, num_threads=num_threads, **OPTIONS)
        for way, is_elsewhere in WAYS.items()
    }
    this = psutil.Process()
    cores = this.children()
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    for number in range(num_rounds + 1):
        for way, engine in engines.items():
            begin, here, there = time.monotonic(), processor_s([this]), processor_s(cores)
            firsts = await asyncio.gather(*(stream(engine, index, num_tokens) for index in range(num_streams)))
            step_us = (time.monotonic() - begin) / num_tokens * 1e6
            spent = [(processor_s([this]) - here) / num_tokens * 1e6, (processor_s(cores) - there) / num_tokens * 1e6]
            # The first round warms up.
            if number:
                found[way].append((step_us, statistics.median(firsts) * 1e3, *spent))
    medians = {
        way: [statistics.median(values) for values in zip(*rounds, strict=True)] for way, rounds in found.items()
    }
    for way, (step_us, first_ms, here_us, there_us) in medians.items():
        print(
            f"{num_streams} streams, core {way}: {step_us:.0f} us a step, first token after {first_ms:.1f} ms; "
            f"processor {here_us:.0f} us in the program, {there_us:.0f} us in the core's process"
        )
    one, other = medians.values()
    print(f"{num_streams} streams: a step takes {other[0] / one[0]:.3f} of the time in the program")
    for engine in engines.values():
        engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 1])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    starts: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for _ in range(options.starts):
        for way, is_elsewhere in WAYS.items():
            starts[way].append(start(is_elsewhere))
    for way, rounds in starts.items():
        if rounds:
            started, first, mib = (statistics.median(values) for values in zip(*rounds, strict=True))
            print(f"Core {way}: ready after {started:.2f} s, first token after {first:.2f} s, {mib:.0f} MiB here")
    for num_streams in options.streams:
        asyncio.run(compare_streams(num_streams, options.tokens, options.rounds, options.threads))


if __name__ == "__main__":
    main()
