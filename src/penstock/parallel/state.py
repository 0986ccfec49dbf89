"""Rank, world size and groups of a worker, passed explicitly; there is no global state."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.parallel.agreement import GroupAgreement
from penstock.parallel.group import ONE_RANK, Group


@dataclass(frozen=True, slots=True)
class ParallelState:
    """Rank and groups of a worker. The groups of a single worker have one rank each.

    tensor: tensor-parallel group. pipeline: pipeline-parallel group.
    context: decode-context-parallel group: ranks of `tensor` with the same KV heads, whose KV cache positions are
        split round-robin in runs of `interleave`.
    min_scattered_tokens: tokens of a step from which on sequence parallelism is used; None is never.
    pipeline_layers: layers per stage, if configured.
    agreement: check of every step among the ranks of a stage; None for one rank.
    embeds_at_end: whether the last stage has the embedding too.
    local_rank, num_local_ranks: rank and number of ranks on this machine, which share its CPUs; None if all ranks are.
    """

    rank: int = 0
    world_size: int = 1
    tensor: Group = ONE_RANK
    pipeline: Group = ONE_RANK
    context: Group = ONE_RANK
    interleave: int = 1
    min_scattered_tokens: int | None = None
    agreement: GroupAgreement | None = None
    pipeline_layers: tuple[int, ...] | None = None
    embeds_at_end: bool = False
    local_rank: int | None = None
    num_local_ranks: int | None = None

    @property
    def place_on_machine(self) -> tuple[int, int]:
        """Rank on this machine, and number of ranks there."""
        return (
            self.rank if self.local_rank is None else self.local_rank,
            self.world_size if self.num_local_ranks is None else self.num_local_ranks,
        )
