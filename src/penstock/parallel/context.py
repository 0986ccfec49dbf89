"""A rank's place among the others, handed to whatever needs it; there is no global one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """One rank's coordinates. A single worker is rank 0 of 1 in every dimension."""

    rank: int = 0
    world_size: int = 1
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_rank: int = 0
    pipeline_parallel_size: int = 1
