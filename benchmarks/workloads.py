"""Workloads for all engines: token ids in, fixed numbers of tokens out, greedy."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """prompts: token ids. num_outputs: tokens to generate for each. unit: what the figure counts per second."""

    name: str
    title: str
    prompts: list[list[int]]
    num_outputs: list[int]
    unit: str

    @property
    def num_units(self) -> int:
        """Input tokens for a prefill workload, else output tokens."""
        return sum(map(len, self.prompts)) if self.unit == "input tok/s" else sum(self.num_outputs)


def make_workloads(*, vocab_size: int = 32_000, draw: int = 0) -> list[Workload]:
    """Decode, throughput, prefill and shared prefix; equal for equal arguments.

    draw: prompts of the same lengths but other tokens, which no engine has in a cache of prefixes.
    """
    rng = random.Random(0)
    lengths = [rng.randint(16, 256) for _ in range(32)]
    outputs = [rng.randint(16, 128) for _ in range(32)]
    tokens_rng = rng if draw == 0 else random.Random(f"0, draw {draw}")

    def tokens(count: int) -> list[int]:
        return [tokens_rng.randrange(10, vocab_size) for _ in range(count)]

    shared = tokens(384)
    return [
        Workload("decode", "1 request, 32 in, 128 out", [tokens(32)], [128], "output tok/s"),
        Workload(
            "throughput",
            "32 requests at once, 16-256 in, 16-128 out",
            [tokens(length) for length in lengths],
            outputs,
            "output tok/s",
        ),
        Workload("prefill", "8 requests, 512 in, 1 out", [tokens(512) for _ in range(8)], [1] * 8, "input tok/s"),
        Workload(
            "shared prefix",
            "32 requests, 384 shared + 16 own in, 32 out",
            [shared + tokens(16) for _ in range(32)],
            [32] * 32,
            "output tok/s",
        ),
    ]
