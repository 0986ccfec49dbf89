"""Recurrent block of Griffin (De et al. 2024, https://arxiv.org/abs/2402.19427): a convolution, then an RG-LRU.

Suffixes: T tokens, D hidden size, H blocks of the gates' weights, X channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.kernels.activation import GATED_ACTIVATIONS
from penstock.kernels.recurrence import ConvolutionRule, GateRule, ScanParameters, ScanRule, gated_norm
from penstock.kernels.rotary import Rotation
from penstock.kernels.rows import columns, concatenate_rows
from penstock.layers.block_linear import BlockLinear
from penstock.layers.parallel_linear import MergedColumnParallelLinear, RowParallelLinear
from penstock.layers.recurrence.modules import CausalConvolution
from penstock.layers.recurrence.operations import scan
from penstock.layers.recurrence.state import RecurrentMixer, RecurrentState, output_rows
from penstock.layers.weights import Part, WeightSlot
from penstock.parallel import ParallelState, share_of_rank

# Factor on the recurrence gate, c in equation 4.
_GATE_FACTOR = 8.0
_CONVOLUTION = ConvolutionRule()
_INPUT_GATE = GateRule(activation="sigmoid")


class GatedLRU(RecurrentMixer):
    """out(activation(y) * scan(x * sigmoid(input_gate(x)), recurrent_gate(x))), where x goes through a convolution.

    x and y are projections, side by side. Gates have block-diagonal weights, and blocks are split over the ranks.
    decay_log: [1, 1, X], log(8 * softplus(parameter)). name: of the layer's state in the KV cache.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        num_blocks: int,
        kernel_size: int,
        *,
        activation: str,
        name: str,
        parallel: ParallelState,
    ) -> None:
        super().__init__()
        blocks, size = share_of_rank(num_blocks, parallel.tensor, "blocks of gates"), width // num_blocks
        channels = blocks * size
        self.in_proj = MergedColumnParallelLinear(hidden_size, {"x": channels, "y": channels}, bias=True)
        self.conv1d = CausalConvolution([channels], kernel_size, bias=True)
        self.input_gate, self.recurrent_gate = (BlockLinear(blocks, size, size) for _ in range(2))
        self.decay_log = nn.Parameter(torch.empty(1, 1, channels.size, dtype=torch.float32), requires_grad=False)
        self.out_proj = RowParallelLinear(width, hidden_size, bias=True, parallel=parallel)
        self.layer = RecurrentState(name=name, convolution=self.conv1d.state, scan=(1, 1, channels.size))
        self._channels, self._activate_and_mul = channels, GATED_ACTIVATIONS[activation]
        self._rule = ScanRule(
            num_groups=1,
            values=0,
            keys=None,
            queries=None,
            steps=0,
            step_size="value",
            step_activation="sigmoid",
            keeps_variance=True,
        )

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of the parameters of the RG-LRU."""
        channels = self._channels
        part = None if channels.size == channels.whole else Part(0, (channels,))
        return {
            "recurrent_param": _DecaySlot((channels.whole,), self.decay_log.view(-1), part),
            **self.input_gate.slots_as("input_gate"),
            **self.recurrent_gate.slots_as("recurrent_gate"),
        }

    def forward(self, hidden_TD: Tensor, rotation: Rotation | None, context: ForwardContext) -> Tensor:
        """rotation: unused; mixers are called as attention is."""
        of_all, size = context.of_all_tokens(), self._channels.size
        projected_TW = self.in_proj(context.whole(hidden_TD), of_all)
        mixed_TX = self.conv1d(self.layer, projected_TW, context, _CONVOLUTION)
        inputs_TX = gated_norm(mixed_TX, self.input_gate(mixed_TX, of_all), None, 0.0, _INPUT_GATE)
        gates_TX = self.recurrent_gate(mixed_TX, of_all)
        scanned_TX = scan(self.layer, inputs_TX, gates_TX, context, self._rule, ScanParameters(self.decay_log))
        joined_TW = concatenate_rows(columns(projected_TW, size, size), scanned_TX)
        return self.out_proj(self._activate_and_mul(output_rows(joined_TW, context)), context)  # type: ignore[no-any-return]


class _DecaySlot(WeightSlot):
    """Slot of the parameter of the decays; in float64, so that bits do not depend on the size of a rank's part."""

    def fill(self, part: Tensor) -> None:
        WeightSlot.fill(self, (_GATE_FACTOR * nn.functional.softplus(part.double())).log())
