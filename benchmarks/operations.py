"""Time of a step by operation of its recorded program: products, attention, norms, and what is between them.

    python -m benchmarks.operations [--shape llama-60m] [--dtype bfloat16] [--quantization int8] [--prompts 512 2048]
        [--decodes 1 32] [--threads 2] [--repeats 5]

A prompt of every length is computed alone, in chunks as the scheduler makes them, and a decode step of as many
requests is repeated. For products and causal attention the multiply-adds are counted, and their share of the
processor's ceiling, which is measured before and after. The rest of a step is what its operations do not take: Python,
and sampling.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ceilings import Ceilings
from benchmarks.full_steps import Engine
from benchmarks.machine import described, machine
from benchmarks.peers.checkpoints import make
from benchmarks.peers.shapes import SHAPES
from penstock.kernels.native.program import NativeProgram
from penstock.kernels.native.tracing import Operation

_DECODE_STEPS = 40
_CONTEXT = 64


@dataclass(frozen=True, order=True)
class Part:
    """Operations with one name and, of products, one shape: inputs and outputs of a row."""

    name: str
    inputs: int = 0
    outputs: int = 0

    @classmethod
    def of(cls, operation: Operation) -> Part:
        read, _, made = operation.cells
        assert operation.type is not None, "opaque operations are not timed"
        if "linear" not in operation.type.name or read is None or made is None:
            return cls(operation.type.name)
        return cls(operation.type.name, read.width, made.width)

    def __str__(self) -> str:
        return f"{self.name} {self.inputs} to {self.outputs}" if self.inputs else self.name


class TimedEngine(Engine):
    """One engine without a prefix cache, whose recorded programs are timed."""

    def finish_timed(self) -> float:
        """Seconds until no request is left."""
        begin = time.perf_counter()
        self.finish()
        return time.perf_counter() - begin

    def step(self) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        self.core.step()
        return time.perf_counter() - begin

    def measure(self, *, is_on: bool = True) -> None:
        for program in _programs():
            program.measure(is_on=is_on)

    def parts(self) -> dict[Part, float]:
        """Seconds by part since `measure`."""
        parts: dict[Part, float] = defaultdict(float)
        for program in _programs():
            for operation, nanoseconds in program.operation_times():
                parts[Part.of(operation)] += nanoseconds / 1e9
        return {part: seconds for part, seconds in parts.items() if seconds}


def _programs() -> list[NativeProgram]:
    """The programs that this process has recorded."""
    found = [one for one in gc.get_objects() if isinstance(one, NativeProgram)]
    assert found, "the model runs layer by layer"
    return found


@dataclass(frozen=True)
class Times:
    """Median seconds of a whole run, and of its parts. flop: additions and multiplications of products, attention."""

    seconds: float
    parts: dict[Part, float]
    flop: dict[Part, float]

    def lines(self, gflop_s: float | None) -> list[str]:
        found = ["| operation | ms | of the whole | GFLOP/s | of the ceiling |", "| --- | ---: | ---: | ---: | ---: |"]
        rest = self.seconds - sum(self.parts.values())
        for part, seconds in sorted(self.parts.items(), key=lambda one: -one[1]):
            found.append(self._line(str(part), seconds, self.flop.get(part), gflop_s))
        found.append(self._line("the rest", rest, None, None))
        found.append(self._line("whole", self.seconds, sum(self.flop.values()), gflop_s))
        return found

    def _line(self, name: str, seconds: float, flop: float | None, gflop_s: float | None) -> str:
        rate = None if flop is None else flop / seconds / 1e9
        cells = ["" if rate is None else f"{rate:,.0f}", "" if None in (rate, gflop_s) else f"{rate / gflop_s:.0%}"]
        return f"| {name} | {seconds * 1e3:.2f} | {seconds / self.seconds:.1%} | {cells[0]} | {cells[1]} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-60m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--decodes", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    options = {
        "dtype": arguments.dtype,
        "quantization": arguments.quantization,
        "num_threads": arguments.threads,
        "block_size": arguments.block_size,
    }
    with tempfile.TemporaryDirectory() as folder:
        ceilings = Ceilings(Path(folder), arguments.threads)
        model = make(Path(folder), SHAPES[arguments.shape], "float32" if arguments.dtype == "float32" else "bfloat16")
        print(described(machine(arguments.threads)))
        engine = TimedEngine(str(model), **options, kv_cache_memory_bytes="1GiB")
        title = f"{arguments.shape}, {arguments.dtype}, {arguments.quantization or 'no quantization'}"
        with closing(engine.core):
            for num_tokens in arguments.prompts:
                before = ceilings.measure()
                times = time_prompt(engine, num_tokens, SHAPES[arguments.shape].config, arguments.repeats)
                rate = _gflop_s(arguments.dtype, before, ceilings.measure())
                print(f"\n{title}: a prompt of {num_tokens} tokens\n", *times.lines(rate), sep="\n")
            for num_requests in arguments.decodes:
                times = time_decode(engine, num_requests, arguments.repeats)
                print(f"\n{title}: a step of {num_requests} requests\n", *times.lines(None), sep="\n")


def _gflop_s(dtype: str, *measured: dict[str, float] | None) -> float | None:
    name = "bfloat16_gflop_s" if dtype == "bfloat16" else "gflop_s"
    found = [one.get(name, one["gflop_s"]) for one in measured if one is not None]
    return statistics.mean(found) if found else None


def time_prompt(engine: TimedEngine, num_tokens: int, config: dict[str, Any], repeats: int) -> Times:
    """Times of prompts of this length, each alone."""

    def run() -> float:
        engine.add(num_tokens, temperature=0, max_tokens=1)
        return engine.finish_timed()

    seconds, parts = _medians(engine, run, repeats)
    flop = {part: 2.0 * part.inputs * part.outputs * num_tokens for part in parts if part.inputs}
    pairs = num_tokens * (num_tokens + 1) / 2
    width = config["num_attention_heads"] * config["head_dim"] * config["num_hidden_layers"]
    flop |= {part: 4.0 * pairs * width for part in parts if part.name == "attention"}
    flop = _by_calls(flop)
    engine.measure(is_on=False)
    return Times(seconds, parts, flop)


def time_decode(engine: TimedEngine, num_requests: int, repeats: int) -> Times:
    """Times of a decode step of so many requests."""
    for _ in range(num_requests):
        engine.add(_CONTEXT, temperature=0, max_tokens=2 + (repeats + 1) * _DECODE_STEPS)
    for _ in range(3):
        engine.step()

    def run() -> float:
        return sum(engine.step() for _ in range(_DECODE_STEPS)) / _DECODE_STEPS

    seconds, parts = _medians(engine, run, repeats)
    engine.measure(is_on=False)
    engine.finish()
    return Times(seconds, {part: one / _DECODE_STEPS for part, one in parts.items()}, {})


def _medians(engine: TimedEngine, run: Callable[[], float], repeats: int) -> tuple[float, dict[Part, float]]:
    run()
    runs = []
    for _ in range(repeats):
        engine.measure()
        runs.append((run(), engine.parts()))
    parts = {part: statistics.median(of.get(part, 0.0) for _, of in runs) for part in runs[-1][1]}
    return statistics.median(seconds for seconds, _ in runs), parts


def _by_calls(flop: dict[Part, float]) -> dict[Part, float]:
    """Multiply what one call takes by the calls with all rows; those of last tokens count for nothing."""
    program = max(_programs(), key=lambda one: sum(nanoseconds for _, nanoseconds in one.operation_times()))
    counts: Counter[Part] = Counter()
    for operation, _ in program.operation_times():
        if operation.narrows:
            break
        counts[Part.of(operation)] += 1
    return {part: one * (1 if part.name == "attention" else counts[part]) for part, one in flop.items()}


if __name__ == "__main__":
    main()
