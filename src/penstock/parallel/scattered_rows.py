"""What is between a model's layers, where each rank keeps some tokens of it only (sequence parallelism).

Suffixes: T tokens of the step, S tokens of a rank, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from penstock.parallel.group import Group
from penstock.parallel.state import ParallelState


@dataclass(frozen=True, slots=True)
class ScatteredRows:
    """Equal runs of the step's tokens, by rank; what the last ranks have too few is filled up with zeros."""

    group: Group
    num_tokens: int

    @property
    def num_own(self) -> int:
        """S."""
        return -(-self.num_tokens // self.group.size)

    def own(self, whole_TD: Tensor) -> Tensor:
        """This rank's rows of what all ranks have: [S, D]."""
        return self._filled_up(whole_TD).narrow(0, self.group.rank * self.num_own, self.num_own)

    def add_up(self, part_TD: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' tensors: [S, D]."""
        return self.group.reduce_scatter(self._filled_up(part_TD), 0)

    def whole(self, rows_SD: Tensor) -> Tensor:
        """The rows of all ranks: [T, D]."""
        return self.group.all_gather(rows_SD, 0)[: self.num_tokens]

    def _filled_up(self, tensor_TD: Tensor) -> Tensor:
        missing = -self.num_tokens % self.group.size
        return F.pad(tensor_TD, (0, 0, 0, missing)) if missing else tensor_TD


def scattered_rows(parallel: ParallelState, num_tokens: int) -> ScatteredRows | None:
    """How a step of so many tokens is scattered; None where each rank keeps all of them."""
    least = parallel.min_scattered_tokens
    if least is None or parallel.tensor.size == 1 or num_tokens < least:
        return None
    return ScatteredRows(parallel.tensor, num_tokens)


def parts_between_stages(parallel: ParallelState, num_tokens: int) -> ScatteredRows | None:
    """How the ranks of a stage, where all have its hidden states, each send a part of them to the next stage.

    None where each sends what it has: its rows of those that are scattered already, or all.
    """
    sends_parts = parallel.pipeline.sends_parts and parallel.tensor.size > 1
    if not sends_parts or scattered_rows(parallel, num_tokens) is not None:
        return None
    return ScatteredRows(parallel.tensor, num_tokens)
