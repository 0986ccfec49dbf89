"""A rank's place among the others, handed to whatever needs it; there is no global one."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.parallel.agreement import NO_AGREEMENT, Agreement
from penstock.parallel.group import ONE_RANK, Group


@dataclass(frozen=True, slots=True)
class ParallelState:
    """One rank of all, and the groups that it belongs to. A single worker is alone in each.

    tensor: ranks that have the same layers, each a part of every one. pipeline: ranks with layers of their own.
    context: ranks of `tensor` that have the same KV heads, and keep their positions by turns, `interleave` at a time.
    min_scattered_tokens: of a step from which on each rank of `tensor` keeps some tokens only of what is between the
        layers; None keeps all.
    pipeline_layers: how many each stage has, if that was asked for. agreement: made by all ranks of a stage on every
        step.
    embeds_at_end: whether the last stage has the embedding too, whatever it does with it.
    local_rank, num_local_ranks: of those on this machine, which share its processors; None where that is all of them.
    """

    rank: int = 0
    world_size: int = 1
    tensor: Group = ONE_RANK
    pipeline: Group = ONE_RANK
    context: Group = ONE_RANK
    interleave: int = 1
    min_scattered_tokens: int | None = None
    agreement: Agreement = NO_AGREEMENT
    pipeline_layers: tuple[int, ...] | None = None
    embeds_at_end: bool = False
    local_rank: int | None = None
    num_local_ranks: int | None = None

    @property
    def place_on_machine(self) -> tuple[int, int]:
        """This rank among those of the machine, from 0 on, and their number."""
        return (
            self.rank if self.local_rank is None else self.local_rank,
            self.world_size if self.num_local_ranks is None else self.num_local_ranks,
        )
