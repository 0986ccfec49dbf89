"""Gated short convolution (LFM2, https://arxiv.org/abs/2511.23404). Suffixes: T tokens, D hidden size, X channels."""

from __future__ import annotations

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.kernels.recurrence import ConvolutionRule
from penstock.kernels.rotary import Rotation
from penstock.layers.parallel_linear import MergedColumnParallelLinear, RowParallelLinear
from penstock.layers.recurrence.modules import CausalConvolution
from penstock.layers.recurrence.state import RecurrentMixer, RecurrentState, output_rows
from penstock.parallel import ParallelState, share_of_rank


class ShortConvolution(RecurrentMixer):
    """out(c * convolution(b * x)), where b, c and x are projections of the hidden states, side by side in that order.

    name: of its state in the KV cache. kernel_size: tokens that an output depends on. bias: of all of its parts.
    """

    def __init__(self, hidden_size: int, kernel_size: int, *, bias: bool, name: str, parallel: ParallelState) -> None:
        super().__init__()
        channels = share_of_rank(hidden_size, parallel.tensor, "channels of short convolutions")
        sizes = {"b": hidden_size, "c": hidden_size, "x": hidden_size}
        self.in_proj = MergedColumnParallelLinear.of_sizes(hidden_size, sizes, bias=bias, parallel=parallel)
        self.conv = CausalConvolution([channels], kernel_size, bias=bias)
        self.out_proj = RowParallelLinear(hidden_size, hidden_size, bias=bias, parallel=parallel)
        self.layer = RecurrentState(name=name, convolution=self.conv.state)
        self._rule = ConvolutionRule(offset=2 * channels.size, gates=(0, channels.size))

    def forward(self, hidden_TD: Tensor, rotation: Rotation | None, context: ForwardContext) -> Tensor:
        """rotation: unused; mixers are called as attention is."""
        projected_TX = self.in_proj(context.whole(hidden_TD), context.of_all_tokens())
        mixed_TX = self.conv(self.layer, projected_TX, context, self._rule)
        return self.out_proj(output_rows(mixed_TX, context), context)  # type: ignore[no-any-return]
