"""The stages that workers start in, and how long each took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageTime:
    """seconds: of the rank that took longest, which is `rank`."""

    stage: str
    seconds: float
    rank: int


def describe_stages(times: list[StageTime], num_ranks: int) -> str:
    """All of them in a line, such as "processes 2.1 s (rank 1), model 0.4 s (rank 0)"."""
    return ", ".join(
        f"{time.stage} {time.seconds:.1f} s" + (f" (rank {time.rank})" if num_ranks > 1 else "") for time in times
    )
