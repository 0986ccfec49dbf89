"""State-space layer of Mamba (Gu and Dao 2023, https://arxiv.org/abs/2312.00752).

Suffixes: T tokens, D hidden size, I inner features, R rank of the steps, N state size, G groups, W width of a
projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.kernels.norm import grouped_rms_norm
from penstock.kernels.recurrence import ScanParameters, ScanRule
from penstock.kernels.rotary import Rotation
from penstock.kernels.rows import columns, concatenate_rows
from penstock.layers.parallel_linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
    rows_of_rank,
)
from penstock.layers.recurrence.modules import CausalConvolution, GatedNorm
from penstock.layers.recurrence.operations import scan
from penstock.layers.recurrence.state import RecurrentMixer, RecurrentState, output_rows
from penstock.layers.weights import Part, Shard, WeightSlot, new_parameter
from penstock.parallel import ParallelState, share_of_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveSizes:
    """Sizes and settings of a Mamba layer.

    inner_size: features of the recurrence. step_rank: features that the steps of all of these are made of. kernel_size:
    tokens of a convolution's output. bias, convolution_bias: whether the projections and the convolution have one.
    norm_eps: of norms of the steps' features, keys and queries (dt, B and C); None for no such norms. has_norm_weights:
    whether these have weights.
    """

    inner_size: int
    state_size: int
    step_rank: int
    kernel_size: int
    bias: bool
    convolution_bias: bool
    norm_eps: float | None = None
    has_norm_weights: bool = True


class SelectiveScan(RecurrentMixer):
    """out(scan(c, b(c), dt(c)) * silu(z)), where c = convolution(x), and x and z are projections, side by side.

    Features are split over the ranks; each computes all keys, queries (B and C) and features of the steps.
    decay_log: [1, N, I], `A_log` of checkpoints, [I, N]. D: [I]. name: of the layer's state in the KV cache.
    """

    def __init__(self, hidden_size: int, sizes: SelectiveSizes, *, name: str, parallel: ParallelState) -> None:
        super().__init__()
        inner_size, size, rank = sizes.inner_size, sizes.state_size, sizes.step_rank
        channels = share_of_rank(inner_size, parallel.tensor, "channels of state-space layers")
        projected = {"x": inner_size, "z": inner_size}
        self.in_proj = MergedColumnParallelLinear.of_sizes(hidden_size, projected, bias=sizes.bias, parallel=parallel)
        self.conv1d = CausalConvolution([channels], sizes.kernel_size, bias=sizes.convolution_bias)
        self.x_proj = _Reduced(inner_size, rank + 2 * size, bias=False, parallel=parallel)
        self.steps_norm = self.keys_norm = None
        if sizes.norm_eps is not None:
            self.steps_norm = GroupedNorm(["dt"], rank, sizes.norm_eps, has_weight=sizes.has_norm_weights)
            self.keys_norm = GroupedNorm(["b", "c"], size, sizes.norm_eps, has_weight=sizes.has_norm_weights)
        self.dt_proj = _Steps(rank, inner_size, bias=True, parallel=parallel)
        self.decay_log = _parameter(1, size, channels.size)
        self.D = _parameter(channels.size)
        self.gate = GatedNorm(
            channels,
            0.0,
            group_size=channels.size,
            has_norm=False,
            gates_first=True,
            group=parallel.tensor,
            offset=channels.size,
        )
        self.out_proj = RowParallelLinear(inner_size, hidden_size, bias=sizes.bias, parallel=parallel)
        self.layer = RecurrentState(name=name, convolution=self.conv1d.state, scan=(1, size, channels.size))
        self._channels = channels
        self._rule = ScanRule(
            num_groups=1,
            values=0,
            keys=channels.size,
            queries=channels.size + size,
            steps=0,
            step_size="value",
            scales_values=True,
        )

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of the parameters of the recurrence."""
        decays_IN, channels = self.decay_log[0].t(), self._channels
        return {
            "A_log": WeightSlot((channels.whole, decays_IN.shape[1]), decays_IN, Part(0, (channels,))),
            "D": rows_of_rank(self.D, channels),
        }

    def forward(self, hidden_TD: Tensor, rotation: Rotation | None, context: ForwardContext) -> Tensor:
        """rotation: unused; mixers are called as attention is."""
        of_all = context.of_all_tokens()
        projected_TW = self.in_proj(context.whole(hidden_TD), of_all)
        mixed_TI = self.conv1d(self.layer, projected_TW, context)
        reduced_TW, rank = self.x_proj(mixed_TI, of_all), self.dt_proj.input_size
        steps_TR, keys_TW = columns(reduced_TW, 0, rank), columns(reduced_TW, rank, self.x_proj.output_size - rank)
        if self.steps_norm is not None and self.keys_norm is not None:
            steps_TR, keys_TW = self.steps_norm(steps_TR), self.keys_norm(keys_TW)
        steps_TI, mixed_TW = self.dt_proj(steps_TR, of_all), concatenate_rows(mixed_TI, keys_TW)
        parameters = ScanParameters(self.decay_log, skip=self.D)
        scanned_TI = output_rows(scan(self.layer, mixed_TW, steps_TI, context, self._rule, parameters), context)
        gates_TW = output_rows(projected_TW, context)
        return self.out_proj(self.gate(scanned_TI, gates_TW, context), context)  # type: ignore[no-any-return]


class GroupedNorm(nn.Module):
    """RMSNorm of adjacent groups of features. weight: [G, size]; ones without `has_weight`.

    names: of the groups, the shards of their weights.
    """

    weight: Tensor

    def __init__(self, names: Sequence[Shard], size: int, eps: float, *, has_weight: bool) -> None:
        super().__init__()
        self.eps, self._names = eps, list(names)
        if has_weight:
            self.weight = new_parameter(len(names), size)
        else:
            self.register_buffer("weight", torch.ones(len(names), size, device="cpu"), persistent=False)

    def forward(self, x_TW: Tensor) -> Tensor:
        """[T, G * size]."""
        return grouped_rms_norm(x_TW, self.weight, self.eps)

    def fused_slots(self, shard: Shard) -> dict[str, WeightSlot]:
        row = self.weight[self._names.index(shard)]
        return {"weight": WeightSlot(tuple(row.shape), row)}


class _Reduced(RowParallelLinear):
    """Features of the steps, keys and queries, side by side, which all ranks have, for all tokens."""

    keeps_precision = True

    def forward(self, x_TI: Tensor, context: ForwardContext) -> Tensor:
        return self._group.all_reduce(self.partial(x_TI, context))


class _Steps(ColumnParallelLinear):
    """Steps, of few features."""

    keeps_precision = True


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32), requires_grad=False)
