"""Several workers, one thread each, against one worker with as many threads, in turns.

    python -m benchmarks.ranks [--shapes llama-60m llama-1024] [--ranks 2] [--arrangements tensor pipeline]
                               [--pipeline-layers 5,3] [--turns 7] [--output FOLDER]

Ratios are medians of the ratios of turns: speed of the several workers relative to the one. Weights are random, in
float32. The time of an all-reduce is measured by otherwise idle ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import described, machine, save
from benchmarks.peers.shapes import SHAPES
from penstock.config import EngineConfig
from penstock.config.parallel import ParallelConfig
from penstock.contract import SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.messages import EngineRequest
from penstock.parallel.local_ranks import join_local_ranks, share_memory

_LLAMA_60M = SHAPES["llama-60m"].config
CONFIGS = {
    "llama-60m": _LLAMA_60M,
    "llama-1024": {
        **_LLAMA_60M,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}
ARRANGEMENTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "process": lambda _: {"distributed_executor_backend": "mp"},
    "tensor": lambda size: {"tensor_parallel_size": size},
    "pipeline": lambda size: {"pipeline_parallel_size": size},
}
_MEETING_BYTES = (2 << 10, 64 << 10, 512 << 10)
_MEETINGS = 2000


@dataclass(frozen=True)
class Work:
    """Batch of requests."""

    title: str
    num_requests: int
    prompt_length: int
    num_outputs: int


WORKS = (
    Work("32 requests decode, 96 tokens each", 32, 16, 96),
    Work("8 prompts of 512 tokens", 8, 512, 1),
    Work("32 prompts of 512 tokens", 32, 512, 1),
    Work("1 request decodes, 96 tokens", 1, 16, 96),
)


class Engine:
    """One arrangement of workers."""

    def __init__(self, folder: Path, threads: int, **arrangement: Any) -> None:
        config = EngineConfig.create(
            str(folder),
            device="cpu",
            load_format="dummy",
            dtype="float32",
            num_threads=threads,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=512 << 20,
            **arrangement,
        )
        self.core = EngineCore(config)
        self._num_requests = 0

    def seconds(self, work: Work) -> float:
        """Seconds from the first request to the end of the last one."""
        numbers = random.Random(0)
        begin = time.perf_counter()
        for _ in range(work.num_requests):
            self._num_requests += 1
            prompt = [numbers.randrange(10, _LLAMA_60M["vocab_size"]) for _ in range(work.prompt_length)]
            params = SamplingParams(temperature=0.0, seed=0, max_tokens=work.num_outputs, ignore_eos=True)
            self.core.add_request(
                EngineRequest(req_id=str(self._num_requests), prompt_token_ids=prompt, sampling_params=params)
            )
        while self.core.has_unfinished_requests():
            self.core.step()
        return time.perf_counter() - begin


def measure_collectives(num_ranks: int) -> list[str]:
    """Time of all-reduces between otherwise idle processes: the fastest tenth and the median."""
    lines = ["| sum of | fastest tenth, µs | median, µs |", "| ---: | ---: | ---: |"]
    # Processes that begin as this one get the descriptor too.
    context = multiprocessing.get_context("fork")
    for num_bytes in _MEETING_BYTES:
        descriptor = share_memory(ParallelConfig(tensor_parallel_size=num_ranks))
        with ProcessPoolExecutor(num_ranks, mp_context=context) as pool:
            run = partial(_seconds_of_sums, num_ranks=num_ranks, descriptor=descriptor, num_bytes=num_bytes)
            seconds = sorted(next(iter(pool.map(run, range(num_ranks)))))
        os.close(descriptor)
        fast, median = seconds[len(seconds) // 10], statistics.median(seconds)
        lines.append(f"| {num_bytes >> 10} KiB | {fast * 1e6:.0f} | {median * 1e6:.0f} |")
    return lines


def _seconds_of_sums(rank: int, *, num_ranks: int, descriptor: int, num_bytes: int) -> list[float]:
    """Seconds of each all-reduce."""
    group = join_local_ranks(rank, ParallelConfig(tensor_parallel_size=num_ranks), descriptor).tensor
    tensor, seconds = torch.zeros(num_bytes // 4), []
    for _ in range(_MEETINGS):
        begin = time.perf_counter()
        group.all_reduce(tensor)
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure(
    shape: str, arrangements: Sequence[str], num_ranks: int, turns: int, pipeline_layers: str | None
) -> Iterator[str]:
    """Table lines for every kind of work and arrangement."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[shape]))
        options: list[dict[str, Any]] = [{}, *(ARRANGEMENTS[name](num_ranks) for name in arrangements)]
        for given in options:
            if "pipeline_parallel_size" in given:
                given["pipeline_layers"] = pipeline_layers
        with _closing([Engine(Path(folder), num_ranks, **given) for given in options]) as engines:
            for work in WORKS:
                one, *others = _in_turns([partial(engine.seconds, work) for engine in engines], turns)
                for name, several in zip(arrangements, others, strict=True):
                    ratios = [a / b for a, b in zip(one, several, strict=True)]
                    yield (
                        f"| {shape} | {work.title} | {name} | {_spread(one)} | {_spread(several)} | "
                        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
                    )


def _in_turns(runs: list[Callable[[], float]], turns: int) -> list[list[float]]:
    """Seconds of each engine, in alternating order, without the first turn."""
    seconds: list[list[float]] = [[] for _ in runs]
    for turn in range(turns + 1):
        order = range(len(runs)) if turn % 2 else reversed(range(len(runs)))
        for index in order:
            took = runs[index]()
            if turn > 0:
                seconds[index].append(took)
    return seconds


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.0f} ({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f})"


@contextmanager
def _closing(engines: list[Engine]) -> Iterator[list[Engine]]:
    try:
        yield engines
    finally:
        for engine in engines:
            engine.core.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--arrangements", nargs="*", choices=ARRANGEMENTS, default=list(ARRANGEMENTS))
    parser.add_argument("--pipeline-layers", help="of each stage; the same for all shapes")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path, help="a folder for the table")
    arguments = parser.parse_args()
    ranks = arguments.ranks
    lines = [f"# {ranks} workers and one worker", "", described(machine(ranks)), ""]
    lines += [
        f"| shape | work | workers | one in this process, {ranks} threads, ms | these, as many threads, ms | speed |"
    ]
    lines += ["| --- | --- | --- | ---: | ---: | ---: |"]
    for shape in arguments.shapes:
        lines += measure(shape, arguments.arrangements, ranks, arguments.turns, arguments.pipeline_layers)
    lines += ["", *measure_collectives(ranks)]
    page = "\n".join(lines) + "\n"
    print(page)
    if arguments.output is not None:
        save(arguments.output, "ranks", page=page)


if __name__ == "__main__":
    main()
