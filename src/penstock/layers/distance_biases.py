"""Relative position biases: a learned bias of each head and distance between a query and a key, in buckets.

T5 (Raffel et al. 2019, https://arxiv.org/abs/1910.10683, section 2.1).
Suffixes: S positions, H query heads, B buckets, N distances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.layers.weights import Part, WeightSlot, new_parameter
from penstock.parallel import ParallelState, Share, heads_of_rank


def buckets_of(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Bucket of each distance, int64 and not negative.

    The first half of the buckets have a distance each; the others grow with its logarithm, up to `max_distance`.
    """
    num_exact = num_buckets // 2
    distances_from_1 = distances.clamp(min=1).float()
    grown = torch.log(distances_from_1 / num_exact) / math.log(max_distance / num_exact) * (num_buckets - num_exact)
    large = (num_exact + grown.to(torch.int64)).clamp(max=num_buckets - 1)
    return torch.where(distances < num_exact, distances, large)


@dataclass(frozen=True, slots=True)
class _ByDistance(WeightSlot):
    """Slot of the biases of buckets, [B, H], whose target has them by distance, [H, N]."""

    num_buckets: int = 0
    max_distance: int = 0

    def fill(self, part: Tensor) -> None:
        distances = torch.arange(self.target.shape[1], device=part.device)
        buckets = buckets_of(distances, self.num_buckets, self.max_distance)
        with torch.no_grad():
            self.target.copy_(part.t().index_select(1, buckets))


class CausalBiases(nn.Module):
    """Biases of causal attention, of this rank's heads.

    biases: [H, N] by distance; the last is that of all further ones.
    """

    def __init__(self, num_heads: int, num_buckets: int, max_distance: int, parallel: ParallelState) -> None:
        super().__init__()
        self._share, _ = heads_of_rank(num_heads, num_heads, parallel.tensor)
        self._sizes = num_buckets, max_distance
        self.biases = new_parameter(self._share.size, max_distance + 1)

    def slots(self) -> dict[str, WeightSlot]:
        shape = self._sizes[0], self._share.whole
        return {"weight": _ByDistance(shape, self.biases, _part(self._share), *self._sizes)}


class TwoSidedBiases(nn.Module):
    """Biases of attention in both directions, of this rank's heads: half of the buckets are of keys behind the query.

    weight: [B, H].
    """

    def __init__(self, num_heads: int, num_buckets: int, max_distance: int, parallel: ParallelState) -> None:
        super().__init__()
        self._share, _ = heads_of_rank(num_heads, num_heads, parallel.tensor)
        self._max_distance = max_distance
        self.weight = new_parameter(num_buckets, self._share.size)

    def forward(self, num_positions: int) -> Tensor:
        """Biases of all queries and keys of a text: [H, S, S]."""
        positions_S = torch.arange(num_positions, device=self.weight.device)
        ahead_SS = positions_S[None] - positions_S[:, None]
        half = self.weight.shape[0] // 2
        buckets_SS = buckets_of(ahead_SS.abs(), half, self._max_distance) + (ahead_SS > 0) * half
        return self.weight[buckets_SS].permute(2, 0, 1)

    def slots(self) -> dict[str, WeightSlot]:
        shape = self.weight.shape[0], self._share.whole
        return {"weight": WeightSlot(shape, self.weight, _part(self._share))}


def _part(share: Share) -> Part | None:
    return None if share.size == share.whole else Part(1, (share,))
