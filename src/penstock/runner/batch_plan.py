"""The sizes of a step, padding included, decided before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias


class BatchPlan(NamedTuple):
    """num_tokens, num_reqs: what the step really runs. The padded counts are what the tensors are made for."""

    num_tokens: int
    num_reqs: int
    num_tokens_padded: int
    num_reqs_padded: int

    @classmethod
    def without_padding(cls, num_scheduled_tokens: Mapping[str, int]) -> BatchPlan:
        """For a step that runs so many tokens of each request."""
        num_tokens, num_reqs = sum(num_scheduled_tokens.values()), len(num_scheduled_tokens)
        return cls(num_tokens, num_reqs, num_tokens, num_reqs)


# How many tokens and requests a step that runs so many tokens of each request is padded to: within the runner's limits.
Planner: TypeAlias = Callable[[Mapping[str, int]], BatchPlan]
