"""Decode context parallel: KV cache positions of a request sharded along the sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import UnsupportedFeature
from penstock.parallel.group import Group
from penstock.parallel.state import ParallelState


@dataclass(frozen=True, slots=True)
class ContextShare:
    """Positions of this rank: runs of `interleave` positions, round-robin over the ranks of the group."""

    group: Group
    interleave: int

    def num_kept(self, lengths: np.ndarray) -> np.ndarray:
        """Return how many of the positions below each length this rank keeps, in the same order."""
        rounds, rest = np.divmod(lengths, self.group.size * self.interleave)
        kept: np.ndarray = rounds * self.interleave + np.clip(
            rest - self.group.rank * self.interleave, 0, self.interleave
        )
        return kept

    def slots(self, slots: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of those global slots that this rank keeps, and their slots on this rank.

        A slot is block * block_size + offset, with the block size of all ranks together, or of one rank: a multiple of
        `interleave`.
        """
        block, offset = np.divmod(slots, block_size)
        rounds, within = np.divmod(offset, self.group.size * self.interleave)
        rank, place = np.divmod(within, self.interleave)
        (own,) = np.nonzero(rank == self.group.rank)
        here = block * (block_size // self.group.size) + rounds * self.interleave + place
        return own, here[own]


def context_share(num_kv_heads: int, parallel: ParallelState) -> ContextShare | None:
    """Return this rank's share of layers with so many KV heads in all; None without decode context parallelism.

    Raises UnsupportedFeature where the ranks of a context group have different KV heads.
    """
    size, num_ranks = parallel.context.size, parallel.tensor.size
    if size == 1:
        return None
    num_alike = num_ranks // num_kv_heads
    if num_alike % size != 0 or num_ranks % num_kv_heads != 0:
        sizes = [count for count in range(1, num_alike + 1) if num_alike % count == 0] or [1]
        alike = f"{num_alike} ranks" if num_alike > 1 else "no two ranks"
        raise UnsupportedFeature(
            f"decode_context_parallel_size={size}: with {num_kv_heads} KV heads and tensor_parallel_size={num_ranks}, "
            f"{alike} have the same ones. Sizes that can: {', '.join(map(str, sizes))}."
        )
    return ContextShare(parallel.context, parallel.interleave)
