"""Normalisation layers. Suffixes: T tokens, D hidden size or head size, H query heads, K KV heads."""

from __future__ import annotations

from torch import Tensor, nn

from penstock.kernels.norm import add_rms_norm, rms_norm
from penstock.layers.weights import Shard, WeightSlot, new_parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(size)

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps)

    def add_and_norm(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual); overwrites x."""
        return add_rms_norm(x_TD, residual_TD, self.weight, self.eps)


class QueryKeyNorm(nn.Module):
    """RMSNorm of every query head with one weight and of every key head with another, in one pass.

    weight: [H + K, D], the query norm's weight repeated H times, then the key norm's K times: shards "q" and "k".
    """

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.num_heads = num_heads
        self.weight = new_parameter(num_heads + num_kv_heads, head_size)

    def forward(self, query_key_THD: Tensor) -> Tensor:
        return rms_norm(query_key_THD, self.weight, self.eps)

    def fused_slots(self, shard: Shard) -> dict[str, WeightSlot]:
        rows = {"q": self.weight[: self.num_heads], "k": self.weight[self.num_heads :]}[shard]
        return {"weight": WeightSlot((rows.shape[-1],), rows)}
