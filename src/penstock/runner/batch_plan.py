"""Batch sizes of a step, padding included, decided before the inputs are built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias


class BatchPlan(NamedTuple):
    """num_tokens, num_reqs: actual sizes of the step. The padded counts are the sizes of the tensors."""

    num_tokens: int
    num_reqs: int
    num_tokens_padded: int
    num_reqs_padded: int

    @classmethod
    def without_padding(cls, num_scheduled_tokens: Mapping[str, int]) -> BatchPlan:
        """Plan a step with these tokens of each request and no padding."""
        num_tokens, num_reqs = sum(num_scheduled_tokens.values()), len(num_scheduled_tokens)
        return cls(num_tokens, num_reqs, num_tokens, num_reqs)


# Chooses a step's padded sizes, within the runner's limits, from the scheduled tokens of each request.
Planner: TypeAlias = Callable[[Mapping[str, int]], BatchPlan]
