"""How a step will be run, decided before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class GraphMode(StrEnum):
    """EAGER launches every operator; captured graphs will be further modes."""

    EAGER = "eager"


class BatchPlan(NamedTuple):
    """num_tokens, num_reqs: what the step really runs. The padded counts are what the tensors are made for."""

    num_tokens: int
    num_reqs: int
    num_tokens_padded: int
    num_reqs_padded: int
    mode: GraphMode = GraphMode.EAGER

    @property
    def is_empty(self) -> bool:
        return self.num_tokens == 0


class Planner:
    """Chooses the plan of each step. Without graphs nothing needs padding."""

    def plan(self, num_scheduled_tokens: Mapping[str, int]) -> BatchPlan:
        """The plan for a step that runs so many tokens of each request."""
        num_tokens, num_reqs = sum(num_scheduled_tokens.values()), len(num_scheduled_tokens)
        return BatchPlan(num_tokens, num_reqs, num_tokens, num_reqs)
