"""Phases of the start of workers, with their times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """seconds: of the rank that took longest, which is `rank`."""

    phase: str
    seconds: float
    rank: int


def describe_phases(times: list[PhaseTime], num_ranks: int) -> str:
    """All of them in a line, such as "processes 2.1 s (rank 1), model 0.4 s (rank 0)"."""
    return ", ".join(
        f"{time.phase} {time.seconds:.1f} s" + (f" (rank {time.rank})" if num_ranks > 1 else "") for time in times
    )
