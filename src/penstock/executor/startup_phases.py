"""Durations of the startup phases of workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Duration of a startup phase on the slowest rank, `rank`."""

    phase: str
    seconds: float
    rank: int


def describe_phases(times: list[PhaseTime], num_ranks: int) -> str:
    """Describe the phases in a line, such as "processes 2.1 s (rank 1), model 0.4 s (rank 0)"."""
    return ", ".join(
        f"{time.phase} {time.seconds:.1f} s" + (f" (rank {time.rank})" if num_ranks > 1 else "") for time in times
    )
