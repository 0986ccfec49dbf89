"""Feed-forward networks. Suffixes: T tokens, D hidden size."""

from __future__ import annotations

from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.kernels.activation import ACTIVATIONS, GATED_ACTIVATIONS, Activation, GatedActivation
from penstock.layers.linear import LinearLayer
from penstock.layers.parallel_linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from penstock.layers.scalable_inputs import FactorOutputs
from penstock.parallel import ParallelState


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)). activation: a name in `GATED_ACTIVATIONS`, or a function like those."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | GatedActivation = "silu",
        bias: bool,
        parallel: ParallelState,
    ) -> None:
        super().__init__()
        sizes = {"gate": intermediate_size, "up": intermediate_size}
        self.gate_up_proj = MergedColumnParallelLinear.of_sizes(hidden_size, sizes, bias=bias, parallel=parallel)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias=bias, parallel=parallel)
        self.down_proj.has_massive_inputs = True
        self._activate_and_mul = GATED_ACTIVATIONS[activation] if isinstance(activation, str) else activation
        if isinstance(activation, str):
            # The others are not linear in the half that they multiply by.
            self.down_proj.scalable_inputs = FactorOutputs(self.gate_up_proj, "up")

    def forward(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        rows = context.output_rows
        if rows is not None:
            hidden_TD = rows.whole(hidden_TD)
        return self.down_proj(self.activated(hidden_TD, context), context)  # type: ignore[no-any-return]

    def partial(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        """The output of this rank's part of the intermediate features, which the ranks have yet to add up."""
        return self.down_proj.partial(self.activated(hidden_TD, context), context)

    def activated(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        """activation(gate(x)) * up(x), of this rank's part of the intermediate features."""
        return self._activate_and_mul(self.gate_up_proj(hidden_TD, context))

    @property
    def projections(self) -> tuple[LinearLayer, LinearLayer]:
        """The projections before and after the activation."""
        return self.gate_up_proj, self.down_proj


class PlainMLP(nn.Module):
    """down(activation(up(x))). activation: a name in `ACTIVATIONS`, or a function like those."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Activation,
        bias: bool = True,
        parallel: ParallelState,
    ) -> None:
        super().__init__()
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias=bias, parallel=parallel)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias=bias, parallel=parallel)
        self.down_proj.has_massive_inputs = True
        self._activate = ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def forward(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        rows = context.output_rows
        if rows is not None:
            hidden_TD = rows.whole(hidden_TD)
        return self.down_proj(self._activate(self.up_proj(hidden_TD, context)), context)  # type: ignore[no-any-return]

    def partial(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        """The output of this rank's part of the intermediate features, which the ranks have yet to add up."""
        return self.down_proj.partial(self._activate(self.up_proj(hidden_TD, context)), context)

    @property
    def projections(self) -> tuple[LinearLayer, LinearLayer]:
        """The projections before and after the activation."""
        return self.up_proj, self.down_proj
