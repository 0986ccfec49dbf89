"""Convolution and gated norm of recurrent layers, with their weights, split over the tensor-parallel ranks.

Suffixes are those of `kernels.recurrence`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.kernels.recurrence import (
    ConvolutionRule,
    GateName,
    GateRule,
    GroupOfRanks,
    gated_norm,
    group_squares,
    shared_group_norm,
)
from penstock.layers.recurrence.operations import convolve
from penstock.layers.recurrence.state import RecurrentState
from penstock.layers.weights import Part, ScaledSlot, WeightSlot, new_parameter
from penstock.parallel import Group, Share
from penstock.parallel.share import Indivisible

# A convolution of a row's first columns, as most layers have it.
SILU = ConvolutionRule(activation="silu")


class CausalConvolution(nn.Module):
    """Causal depthwise convolution. weight: [K, C]; `conv1d.weight` of checkpoints is [C, 1, K].

    shares: this rank's channels of each part of the checkpoint's, such as values, keys and queries. scales: factors on
    the inputs of each, which the weight takes in; None for none.
    """

    def __init__(
        self, shares: Sequence[Share], num_taps: int, *, bias: bool, scales: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        begins = [sum(share.whole for share in shares[:index]) for index in range(len(shares))]
        self._whole = sum(share.whole for share in shares)
        self._part = Part(
            0, tuple(Share(begin + one.start, one.size, self._whole) for begin, one in zip(begins, shares, strict=True))
        )
        self.num_channels = sum(share.size for share in shares)
        self._scales = [(share.size, scale) for share, scale in zip(shares, scales or [1.0] * len(shares), strict=True)]
        self.weight = new_parameter(num_taps, self.num_channels)
        self.bias = new_parameter(self.num_channels) if bias else None

    def slots(self) -> dict[str, WeightSlot]:
        target_C1K = self.weight.t().unsqueeze(1)
        factors = torch.cat([torch.full((size, 1, 1), scale, device="cpu") for size, scale in self._scales])
        shape = self._whole, *target_C1K.shape[1:]
        slots: dict[str, WeightSlot] = {"weight": ScaledSlot(shape, target_C1K, self._part, factors)}
        if self.bias is not None:
            slots["bias"] = WeightSlot((self._whole,), self.bias, self._part)
        return slots

    @property
    def state(self) -> tuple[int, int]:
        """`RecurrentState.convolution` of a layer with this convolution."""
        return self.weight.shape[0] - 1, self.num_channels

    def forward(
        self,
        state: RecurrentState,
        x_TW: Tensor,
        context: ForwardContext,
        rule: ConvolutionRule = SILU,
    ) -> Tensor:
        """`kernels.recurrence.convolve`: [T, C]."""
        return convolve(state, x_TW, context, self.weight, self.bias, rule)


class GatedNorm(nn.Module):
    """RMSNorm of groups of channels with a gate (`kernels.recurrence.gated_norm`).

    channels: this rank's. group_size: channels that are normalised together, which may be of several ranks.
    is_shared: one weight for all groups, [group_size]. has_norm: False for the gate alone. offset, gates_first,
    activation, gate_scale: of `GateRule`.
    """

    def __init__(
        self,
        channels: Share,
        eps: float,
        *,
        group_size: int,
        gates_first: bool,
        group: Group,
        activation: GateName = "silu",
        is_shared: bool = False,
        has_norm: bool = True,
        gate_scale: float = 1.0,
        offset: int = 0,
    ) -> None:
        super().__init__()
        if group_size % channels.size and channels.size % group_size:
            raise Indivisible(
                f"a norm of {channels.whole} channels in groups of {group_size} cannot be shared by "
                f"{channels.whole // channels.size} ranks."
            )
        self._rule = GateRule(
            offset=offset, group_size=group_size, gates_first=gates_first, activation=activation, scale=gate_scale
        )
        self._eps, self._channels, self._group, self._is_shared = eps, channels, group, is_shared
        self.weight = new_parameter(group_size if is_shared else channels.size) if has_norm else None

    def slots(self) -> dict[str, WeightSlot]:
        if self.weight is None:
            return {}
        if self._is_shared:
            return {"weight": WeightSlot((self._rule.group_size,), self.weight)}
        return {"weight": WeightSlot((self._channels.whole,), self.weight, Part(0, (self._channels,)))}

    def forward(self, y_TX: Tensor, gate_TW: Tensor, _: ForwardContext) -> Tensor:
        """[T, X]."""
        if self.weight is None or self._rule.group_size <= self._channels.size:
            return gated_norm(y_TX, gate_TW, self.weight, self._eps, self._rule)
        if self._rule.gates_first:
            return self._normed(gated_norm(y_TX, gate_TW, None, self._eps, self._rule), self.weight)
        return gated_norm(self._normed(y_TX, self.weight), gate_TW, None, self._eps, self._rule)

    def _normed(self, x_TX: Tensor, weight_X: Tensor) -> Tensor:
        """The norm of a group that several ranks have channels of, each of that group alone."""
        channels, size = self._channels, self._rule.group_size
        group = GroupOfRanks(channels.size, channels.start // size, channels.whole // size, size)
        return shared_group_norm(x_TX, self._group.all_reduce(group_squares(x_TX, group)), weight_X, self._eps, group)
