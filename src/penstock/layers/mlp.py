"""Feed-forward networks. Suffixes: T tokens, D hidden size."""

from __future__ import annotations

from torch import Tensor, nn

from penstock.kernels.activation import silu_and_mul
from penstock.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from penstock.parallel import ParallelContext


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool, parallel: ParallelContext) -> None:
        super().__init__()
        sizes = {"gate": intermediate_size, "up": intermediate_size}
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, sizes, bias=bias, parallel=parallel)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias=bias, parallel=parallel)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden_TD)))  # type: ignore[no-any-return]
