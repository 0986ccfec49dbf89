"""Collectives between ranks in otherwise idle processes, two implementations in turns.

    python -m benchmarks.exchanges [--ranks 2] [--width 1024] [--tokens 256 512 1024 2048] [--rounds 200]

Reduce-scatter against an all-reduce of which each rank takes its share. Hidden states from one pipeline stage to the
next, whose ranks all need them whole: sent by every rank, or in shards that the receivers all-gather.
Medians, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from torch import Tensor

from penstock.config.parallel import ParallelConfig
from penstock.parallel import ParallelState
from penstock.parallel.local_ranks import join_local_ranks, share_memory
from penstock.parallel.scattered_rows import ScatteredRows


def sums(parallel: ParallelState, hidden_TD: Tensor) -> list[Callable[[], object]]:
    """All-reduce with a slice, and reduce-scatter."""
    group = parallel.tensor
    size = len(hidden_TD) // group.size
    return [
        lambda: group.all_reduce(hidden_TD).narrow(0, group.rank * size, size).contiguous(),
        lambda: group.reduce_scatter(hidden_TD, 0),
    ]


def gathers(parallel: ParallelState, hidden_TD: Tensor) -> list[Callable[[], object]]:
    """All-reduce, and reduce-scatter with all-gather."""
    group = parallel.tensor
    return [
        lambda: group.all_reduce(hidden_TD),
        lambda: group.all_gather(group.reduce_scatter(hidden_TD, 0), 0),
    ]


def hops(parallel: ParallelState, hidden_TD: Tensor) -> list[Callable[[], object]]:
    """Point-to-point transfer to the next stage and back: whole from every rank, and in shards with an all-gather."""
    tensor, pipeline = parallel.tensor, parallel.pipeline
    rows = ScatteredRows(tensor, len(hidden_TD))
    part_SD = torch.empty_like(rows.own(hidden_TD))

    def there_and_back(send: Callable[[int], object], receive: Callable[[int], object]) -> object:
        if pipeline.rank == 0:
            send(1)
            return receive(1)
        received = receive(0)
        send(0)
        return received

    return [
        partial(there_and_back, partial(pipeline.send, hidden_TD), lambda source: pipeline.receive(hidden_TD, source)),
        partial(
            there_and_back,
            lambda stage: pipeline.send(rows.own(hidden_TD), stage),
            lambda source: rows.whole(pipeline.receive(part_SD, source)),
        ),
    ]


KINDS = {
    "a rank's share of a sum: summed and sliced, scattered": (sums, 1),
    "a sum: at once, scattered and gathered": (gathers, 1),
    "to the next stage and back: whole, in parts": (hops, 2),
}


def _seconds(
    rank: int, *, kind: str, config: ParallelConfig, descriptor: int, shape: tuple[int, int], rounds: int
) -> list[float]:
    """Median seconds of each implementation."""
    torch.set_num_threads(1)
    make, _ = KINDS[kind]
    ways = make(join_local_ranks(rank, config, descriptor), torch.zeros(shape))
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, took in zip(ways, seconds, strict=True):
            begin = time.perf_counter()
            way()
            took.append(time.perf_counter() - begin)
    return [statistics.median(took) for took in seconds]


def measure(kind: str, num_ranks: int, shape: tuple[int, int], rounds: int) -> list[float]:
    """Measure on rank 0."""
    stages = KINDS[kind][1]
    config = ParallelConfig(tensor_parallel_size=num_ranks, pipeline_parallel_size=stages)
    descriptor = share_memory(config)
    # Processes that begin as this one get the descriptor too.
    with ProcessPoolExecutor(config.world_size, mp_context=multiprocessing.get_context("fork")) as pool:
        run = partial(_seconds, kind=kind, config=config, descriptor=descriptor, shape=shape, rounds=rounds)
        medians = next(iter(pool.map(run, range(config.world_size))))
    os.close(descriptor)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, nargs="*", default=[256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    print(f"{arguments.ranks} ranks, {arguments.width} numbers a token, medians in µs\n")
    print("| what | tokens | first | second | first / second |\n| --- | ---: | ---: | ---: | ---: |")
    for kind in KINDS:
        for num_tokens in arguments.tokens:
            first, second = measure(kind, arguments.ranks, (num_tokens, arguments.width), arguments.rounds)
            print(
                f"| {kind} | {num_tokens} | {first * 1e6:.0f} | {second * 1e6:.0f} | {first / second:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
