"""Kimi Delta Attention (Kimi team 2025, https://arxiv.org/abs/2510.26692): the delta rule with a decay per key channel.

Suffixes: T tokens, D hidden size, H heads, X features of all heads.
"""

from __future__ import annotations

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.kernels.recurrence import ScanParameters, ScanRule
from penstock.kernels.rotary import Rotation
from penstock.kernels.rows import concatenate_rows
from penstock.layers.linear import LinearLayer
from penstock.layers.parallel_linear import (
    ArrangedColumnParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    rows_of_rank,
)
from penstock.layers.recurrence.modules import CausalConvolution, GatedNorm
from penstock.layers.recurrence.operations import scan
from penstock.layers.recurrence.state import RecurrentMixer, RecurrentState, output_rows
from penstock.layers.weights import Part, WeightSlot, new_parameter
from penstock.parallel import ParallelState, share_of_rank


class _Betas(ColumnParallelLinear):
    """A number per head, which are too few to be quantised."""

    keeps_precision = True


class ChannelDelta(RecurrentMixer):
    """out(norm(scan(convolution(q, k, v))) * sigmoid(gate)).

    Decays and gate are projections of a few features, which every rank computes. A_log: [H]. dt_bias: [H * key size].
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        hidden_size: int,
        name: str,
        parallel: ParallelState,
        *,
        num_taps: int,
        norm_eps: float,
    ) -> None:
        super().__init__()
        heads, size = share_of_rank(num_heads, parallel.tensor, "heads"), num_heads * head_size
        share = heads * head_size
        self.in_proj = ArrangedColumnParallelLinear(hidden_size, {"q": [share], "k": [share], "v": [share]}, bias=False)
        self.b_proj = _Betas(hidden_size, num_heads, bias=False, parallel=parallel)
        self.f_a_proj, self.g_a_proj = (LinearLayer(hidden_size, head_size, bias=False) for _ in range(2))
        self.f_b_proj, self.g_b_proj = (
            ColumnParallelLinear(head_size, size, bias=False, parallel=parallel) for _ in range(2)
        )
        self.conv1d = CausalConvolution([share] * 3, num_taps, bias=False)
        self.A_log, self.dt_bias = new_parameter(heads.size), new_parameter(share.size)
        self.norm = GatedNorm(
            share,
            norm_eps,
            group_size=head_size,
            gates_first=False,
            group=parallel.tensor,
            activation="sigmoid",
            is_shared=True,
        )
        self.out_proj = RowParallelLinear(size, hidden_size, bias=False, parallel=parallel)
        self.layer = RecurrentState(name=name, convolution=self.conv1d.state, scan=(heads.size, head_size, head_size))
        self._heads, self._share = heads, share
        self._rule = ScanRule(
            num_groups=heads.size,
            queries=0,
            keys=share.size,
            values=2 * share.size,
            steps=0,
            step_size="key",
            betas=share.size,
            has_unit_keys=True,
            query_scale=head_size**-0.5,
        )

    def forward(self, hidden_TD: Tensor, rotation: Rotation | None, context: ForwardContext) -> Tensor:
        hidden_TD, of_all = context.whole(hidden_TD), context.of_all_tokens()
        mixed_TX = self.conv1d(self.layer, self.in_proj(hidden_TD, of_all), context)
        steps_TX = self.f_b_proj(self.f_a_proj(hidden_TD, of_all), of_all)
        gate_TX = self.g_b_proj(self.g_a_proj(hidden_TD, of_all), of_all)
        gates_TX = concatenate_rows(steps_TX, self.b_proj(hidden_TD, of_all))
        parameters = ScanParameters(self.A_log, self.dt_bias)
        scanned_TX = scan(self.layer, mixed_TX, gates_TX, context, self._rule, parameters)
        normed_TX = self.norm(scanned_TX, gate_TX, of_all)
        return self.out_proj(output_rows(normed_TX, context), context)  # type: ignore[no-any-return]

    def slots(self) -> dict[str, WeightSlot]:
        heads, decays_11H1 = self._heads, self.A_log.view(1, 1, -1, 1)
        part = None if heads.size == heads.whole else Part(2, (heads,))
        return {
            "A_log": WeightSlot((1, 1, heads.whole, 1), decays_11H1, part),
            "dt_bias": rows_of_rank(self.dt_bias, self._share),
        }
