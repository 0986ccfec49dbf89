"""State-space layer of Mamba 2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060).

Suffixes: T tokens, D hidden size, H heads, W width of the projection, C channels of the convolution, X concatenated
heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.kernels.recurrence import ConvolutionRule, ScanParameters, ScanRule
from penstock.kernels.rotary import Rotation
from penstock.layers.parallel_linear import MergedColumnParallelLinear, RowParallelLinear, rows_of_rank
from penstock.layers.recurrence.modules import CausalConvolution, GatedNorm
from penstock.layers.recurrence.operations import scan
from penstock.layers.recurrence.state import RecurrentMixer, RecurrentState, output_rows
from penstock.layers.weights import WeightSlot
from penstock.parallel import ParallelState, heads_of_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """Sizes and settings of a Mamba 2 layer.

    num_groups: groups of heads with common keys and queries (B and C). kernel_size: tokens of a convolution's output.
    min_step, max_step: limits of the time step. bias, output_bias, convolution_bias: whether the projections and the
    convolution have one.
    norm_eps: of the norm of the output, by groups of heads. has_norm: False for the gate alone. gates_first: whether
    the gate is applied before that norm. gate_scale, input_scales, step_scale: factors on the gate, on the inputs x, B
    and C of the convolution, and on the time step before its bias.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    kernel_size: int
    min_step: float = 0.0
    max_step: float = float("inf")
    bias: bool = False
    output_bias: bool = False
    convolution_bias: bool = True
    norm_eps: float
    has_norm: bool = True
    gates_first: bool = True
    gate_scale: float = 1.0
    input_scales: tuple[float, ...] | None = None
    step_scale: float = 1.0

    @property
    def inner_size(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_size


class StateSpaceMixer(RecurrentMixer):
    """out(norm(scan(convolution(x, B, C), dt), z)) of the projections z, x, B, C and dt, side by side in that order.

    Heads are split over the ranks, and groups with them; ranks with heads of one group both have it.
    A_log, dt_bias, D: [H], parameters of the recurrence. name: of the layer's state in the KV cache.
    """

    def __init__(self, hidden_size: int, sizes: StateSpace, *, name: str, parallel: ParallelState) -> None:
        super().__init__()
        names = "state-space heads", "groups"
        heads, groups = heads_of_rank(sizes.num_heads, sizes.num_groups, parallel.tensor, names)
        channels, keys = heads * sizes.head_size, groups * sizes.state_size
        parts = {"z": channels, "x": channels, "b": keys, "c": keys, "dt": heads}
        self.in_proj = MergedColumnParallelLinear(hidden_size, parts, bias=sizes.bias)
        self.conv1d = CausalConvolution(
            [channels, keys, keys], sizes.kernel_size, bias=sizes.convolution_bias, scales=sizes.input_scales
        )
        self.A_log, self.dt_bias, self.D = [_parameter(heads.size) for _ in range(3)]
        self.norm = GatedNorm(
            channels,
            sizes.norm_eps,
            group_size=sizes.inner_size // sizes.num_groups,
            has_norm=sizes.has_norm,
            gates_first=sizes.gates_first,
            gate_scale=sizes.gate_scale,
            group=parallel.tensor,
        )
        self.out_proj = RowParallelLinear(sizes.inner_size, hidden_size, bias=sizes.output_bias, parallel=parallel)
        state_shape = heads.size, sizes.state_size, sizes.head_size
        self.layer = RecurrentState(name=name, convolution=self.conv1d.state, scan=state_shape)
        self._heads = heads
        self._convolution = ConvolutionRule(offset=channels.size, activation="silu")
        self._rule = ScanRule(
            num_groups=groups.size,
            values=0,
            keys=channels.size,
            queries=channels.size + keys.size,
            steps=2 * (channels.size + keys.size),
            step_scale=sizes.step_scale,
            scales_values=True,
            min_step=sizes.min_step,
            max_step=sizes.max_step,
        )

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of the parameters of the recurrence."""
        return {name: rows_of_rank(getattr(self, name), self._heads) for name in ("A_log", "dt_bias", "D")}

    def forward(self, hidden_TD: Tensor, rotation: Rotation | None, context: ForwardContext) -> Tensor:
        """rotation: unused; mixers are called as attention is."""
        return self.finish(*self.begin(hidden_TD, context), context)

    def begin(self, hidden_TD: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Outputs of the recurrence, [T, X], and projections, [T, W], of all tokens, for `finish`."""
        projected_TW = self.in_proj(context.whole(hidden_TD), context.of_all_tokens())
        mixed_TC = self.conv1d(self.layer, projected_TW, context, self._convolution)
        parameters = ScanParameters(self.A_log, self.dt_bias, self.D)
        return scan(self.layer, mixed_TC, projected_TW, context, self._rule, parameters), projected_TW

    def finish(self, values_TX: Tensor, projected_TW: Tensor, context: ForwardContext) -> Tensor:
        """Gate, norm and output projection, of the last tokens where the context is narrowed to them: [T, D]."""
        values_TX, gates_TW = output_rows(values_TX, context), output_rows(projected_TW, context)
        return self.out_proj(self.norm(values_TX, gates_TW, context), context)  # type: ignore[no-any-return]


def _parameter(size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)
