"""Normalisation layers. Suffixes: T tokens, D hidden size or head size, H query heads, K KV heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.kernels.norm import (
    add_layer_norm,
    add_rms_norm,
    add_rms_norm_rounded_last,
    layer_norm,
    rms_norm,
    rms_norm_rounded_last,
)
from penstock.kernels.rows import columns, concatenate_rows
from penstock.layers.weights import Part, Shard, WeightSlot, new_parameter
from penstock.parallel import Group, Share


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


class NoNorm(nn.Module):
    """Identity, in place of a norm."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD

    def add_and_norm(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        residual_TD = x_TD.add_(residual_TD)
        return residual_TD, residual_TD


class RMSNormRoundedLast(RMSNorm):
    """RMSNorm that rounds to the input's dtype after multiplying by the weight.

    weight_offset: added to the stored weight; 1 for weights trained around 0.
    """

    def __init__(self, size: int, eps: float, *, weight_offset: float = 0.0) -> None:
        super().__init__(size, eps)
        self.weight_offset = weight_offset

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm_rounded_last(x_TD, self.weight, self.eps, self.weight_offset)

    def add_and_norm(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm_rounded_last(x_TD, residual_TD, self.weight, self.eps, self.weight_offset)


class ZeroCentredRMSNorm(RMSNormRoundedLast):
    """An RMSNorm whose stored weight is less one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps, weight_offset=1.0)


def has_shifted_weights(model: nn.Module) -> bool:
    """Whether a norm adds an offset to its weight, of which recorded programs then have a copy."""
    return any(getattr(module, "weight_offset", 0.0) for module in model.modules())


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias. has_bias: whether there is a bias."""

    def __init__(self, size: int, eps: float, *, has_bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(size)
        self.bias = new_parameter(size) if has_bias else None

    def forward(self, x_TD: Tensor) -> Tensor:
        return layer_norm(x_TD, self.weight, self.bias, self.eps)

    def add_and_norm(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual); overwrites x."""
        return add_layer_norm(x_TD, residual_TD, self.weight, self.bias, self.eps)


def norm_of_stream(
    norm: RMSNorm | LayerNorm | NoNorm, x_TD: Tensor, residual_TD: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(norm of the residual stream, the stream), which is x + residual, or x at the first layer; overwrites x."""
    return (norm(x_TD), x_TD) if residual_TD is None else norm.add_and_norm(x_TD, residual_TD)


class QueryKeyNorm(nn.Module):
    """RMSNorm of every query head with one weight and of every key head with another, in one pass.

    weight: [H + K, D], the query norm's weight repeated H times, then the key norm's K times: shards "q" and "k".
    """

    follows_rotation = False

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.num_heads = num_heads
        self.weight = new_parameter(num_heads + num_kv_heads, head_size)

    @property
    def rms_of_each_head(self) -> tuple[Tensor, float] | None:
        return self.weight, self.eps

    def forward(self, query_key_THD: Tensor) -> Tensor:
        return rms_norm(query_key_THD, self.weight, self.eps)

    def fused_slots(self, shard: Shard) -> dict[str, WeightSlot]:
        rows = {"q": self.weight[: self.num_heads], "k": self.weight[self.num_heads :]}[shard]
        return {"weight": WeightSlot((rows.shape[-1],), rows)}


class QueryKeyNormAfterRotation(QueryKeyNorm):
    """A QueryKeyNorm of heads that were rotated."""

    follows_rotation = True


class UnweightedQueryKeyNorm(nn.Module):
    """RMSNorm of every query and key head without a weight. weight: float32 [H + K, D], ones."""

    follows_rotation = False
    weight: Tensor

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        ones = torch.ones(num_heads + num_kv_heads, head_size, dtype=torch.float32, device="cpu")
        self.register_buffer("weight", ones, persistent=False)

    @property
    def rms_of_each_head(self) -> tuple[Tensor, float]:
        return self.weight, self.eps

    def forward(self, query_key_THD: Tensor) -> Tensor:
        return rms_norm_rounded_last(query_key_THD, self.weight, self.eps, 0.0)


class RoundedLastQueryKeyNorm(QueryKeyNorm):
    """A QueryKeyNorm that rounds as `RMSNormRoundedLast`."""

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_size: int, eps: float, weight_offset: float = 0.0
    ) -> None:
        super().__init__(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, eps=eps)
        self.weight_offset = weight_offset

    @property
    def rms_of_each_head(self) -> tuple[Tensor, float] | None:
        weight = self.weight.to(torch.float32)
        return (weight + self.weight_offset if self.weight_offset else weight), self.eps

    def forward(self, query_key_THD: Tensor) -> Tensor:
        return rms_norm_rounded_last(query_key_THD, self.weight, self.eps, self.weight_offset)


class WholeQueryKeyNorm(nn.Module):
    """RMSNorm over all query heads of a token together, and another over all its key heads."""

    follows_rotation = False

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_size: int, eps: float) -> None:
        super().__init__()
        self.head_counts, self._widths = [num_heads, num_kv_heads], [num_heads * head_size, num_kv_heads * head_size]
        self.rms_of_each_head = None
        self.q_norm = RMSNormRoundedLast(num_heads * head_size, eps)
        self.k_norm = RMSNormRoundedLast(num_kv_heads * head_size, eps)

    def forward(self, query_key_THD: Tensor) -> Tensor:
        query_THD, key_TKD = query_key_THD.split_with_sizes(self.head_counts, 1)
        normed_TX = torch.cat((self.q_norm(query_THD.flatten(1)), self.k_norm(key_TKD.flatten(1))), dim=-1)
        return normed_TX.view(query_key_THD.shape)

    def of_rows(self, qkv_TX: Tensor) -> Tensor:
        """Rows of queries, keys and values, of which the former two are normalised: [T, (H + 2 * K) * D]."""
        queries, keys = self._widths
        query_TX, key_TX = self.q_norm(columns(qkv_TX, 0, queries)), self.k_norm(columns(qkv_TX, queries, keys))
        return concatenate_rows(concatenate_rows(query_TX, key_TX), columns(qkv_TX, queries + keys, keys))


class _NormOfShare(RMSNormRoundedLast):
    """A rank's share of a norm's weight and of its input."""

    def __init__(self, share: Share, eps: float) -> None:
        super().__init__(share.size, eps)
        self._share = share

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": WeightSlot((self._share.whole,), self.weight, Part(0, (self._share,)))}

    def mean_of_squares(self, wide_TX: Tensor) -> Tensor:
        """Mean of squares per token, [T, 1]."""
        return (wide_TX * wide_TX).mean(-1, keepdim=True)

    def scaled(self, wide_TX: Tensor, mean_T1: Tensor) -> Tensor:
        return (wide_TX * mean_T1.add(self.eps).rsqrt_()).mul_(self.weight.to(torch.float32))


class SplitWholeQueryKeyNorm(nn.Module):
    """`WholeQueryKeyNorm` with heads split over the ranks.

    heads, kv_heads: this rank's shares; several ranks may have the same KV heads.
    """

    follows_rotation = False
    rms_of_each_head = None

    def __init__(
        self,
        *,
        heads: Share,
        kv_heads: Share,
        group: Group,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        eps: float,
    ) -> None:
        super().__init__()
        self.head_counts = [num_heads, num_kv_heads]
        self.q_norm = _NormOfShare(heads * head_size, eps)
        self.k_norm = _NormOfShare(kv_heads * head_size, eps)
        self._group = group

    def forward(self, query_key_THD: Tensor) -> Tensor:
        wide_THD = query_key_THD.to(torch.float32)
        query_TX, key_TX = [heads.flatten(1) for heads in wide_THD.split_with_sizes(self.head_counts, 1)]
        means_T2 = torch.cat((self.q_norm.mean_of_squares(query_TX), self.k_norm.mean_of_squares(key_TX)), dim=-1)
        # The mean of the ranks' means, which have equal numbers of values.
        query_T1, key_T1 = self._group.all_reduce(means_T2).mul_(1 / self._group.size).split_with_sizes([1, 1], 1)
        normed_TX = torch.cat((self.q_norm.scaled(query_TX, query_T1), self.k_norm.scaled(key_TX, key_T1)), dim=-1)
        return normed_TX.view(query_key_THD.shape).to(query_key_THD.dtype)
