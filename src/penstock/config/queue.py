"""Limits of a server's queue of requests."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.checks import check_integer


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queue; None for no limit.

    max_num_queued_requests: requests beyond those that the cores may run at once (`max_num_seqs` each).
    max_num_queued_tokens: prompt tokens of the requests without a token so far. A single request may exceed it.
    """

    max_num_queued_requests: int | None = 4096
    max_num_queued_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_queued_requests", "max_num_queued_tokens"):
            if (value := getattr(self, name)) is not None:
                check_integer(name, value, 0)
