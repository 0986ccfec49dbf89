"""Sequence parallelism: the residual stream between layers split by tokens among ranks.

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
    """Equal runs of a step's tokens, by rank, zero-padded at the end."""

    group: Group
    num_tokens: int

    @property
    def num_own(self) -> int:
        """Rows of this rank: S."""
        return -(-self.num_tokens // self.group.size)

    def own(self, whole_TD: Tensor) -> Tensor:
        """Return this rank's rows of a replicated tensor: [S, D]."""
        return self._filled_up(whole_TD).narrow(0, self.group.rank * self.num_own, self.num_own)

    def add_up(self, part_TD: Tensor) -> Tensor:
        """Reduce-scatter: return this rank's rows of the sum of all ranks' tensors: [S, D]."""
        return self.group.reduce_scatter(self._filled_up(part_TD), 0)

    def whole(self, rows_SD: Tensor) -> Tensor:
        """All-gather: return the rows of all ranks: [T, D]."""
        return self.group.all_gather(rows_SD, 0)[: self.num_tokens]

    def _filled_up(self, tensor_TD: Tensor) -> Tensor:
        missing = -self.num_tokens % self.group.size
        return F.pad(tensor_TD, (0, 0, 0, missing)) if missing else tensor_TD


def scattered_rows(parallel: ParallelState, num_tokens: int) -> ScatteredRows | None:
    """Return the split of a step of so many tokens; None where each rank keeps all of them."""
    least = parallel.min_scattered_tokens
    if least is None or parallel.tensor.size == 1 or num_tokens < least:
        return None
    return ScatteredRows(parallel.tensor, num_tokens)


def parts_between_stages(parallel: ParallelState, num_tokens: int) -> ScatteredRows | None:
    """Return the split of replicated hidden states, of which each rank sends its rows to the next stage.

    None where each rank sends what it has: its scattered rows already, or all rows.
    """
    sends_parts = parallel.pipeline.sends_parts and parallel.tensor.size > 1
    if not sends_parts or scattered_rows(parallel, num_tokens) is not None:
        return None
    return ScatteredRows(parallel.tensor, num_tokens)
