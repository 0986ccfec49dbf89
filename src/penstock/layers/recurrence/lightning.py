"""Lightning attention (Qin et al. 2024, https://arxiv.org/abs/2401.04658): linear attention with a constant decay.

Suffixes: T tokens, D hidden size, H heads, X features of all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.attention import ForwardContext
from penstock.kernels.activation import silu
from penstock.kernels.recurrence import ScanParameters, ScanRule
from penstock.kernels.rotary import Rotation
from penstock.layers.parallel_linear import (
    ArrangedColumnParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    pieces_of_heads,
)
from penstock.layers.recurrence.modules import GatedNorm
from penstock.layers.recurrence.operations import scan
from penstock.layers.recurrence.state import RecurrentMixer, RecurrentState, output_rows
from penstock.parallel import ParallelState, share_of_rank

# Of the norm over all heads, whatever the other norms have.
_NORM_EPS = 1e-6
# Checkpoints have the three projections of a head in adjacent rows of this tensor.
QKV = "qkv"


class LightningAttention(RecurrentMixer):
    """out(norm(scan(silu(q, k, v))) * sigmoid(gate)).

    decay_log: [H], logarithms of this layer's slopes; a state is multiplied by exp(-slope) before a token is added.
    """

    decay_log: Tensor

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        hidden_size: int,
        name: str,
        parallel: ParallelState,
        *,
        slopes_H: Tensor,
    ) -> None:
        super().__init__()
        heads, size = share_of_rank(num_heads, parallel.tensor, "heads"), num_heads * head_size
        places = [
            piece for place in range(3) for piece in pieces_of_heads(heads, head_size, place * head_size, 3 * head_size)
        ]
        self.qkv_proj = ArrangedColumnParallelLinear(hidden_size, {QKV: places}, bias=False)
        self.output_gate = ColumnParallelLinear(hidden_size, size, bias=False, parallel=parallel)
        self.norm = GatedNorm(
            heads * head_size,
            _NORM_EPS,
            group_size=size,
            gates_first=False,
            group=parallel.tensor,
            activation="sigmoid",
        )
        self.out_proj = RowParallelLinear(size, hidden_size, bias=False, parallel=parallel)
        own_H = slopes_H[heads.start : heads.start + heads.size]
        self.register_buffer("decay_log", own_H.log(), persistent=False)
        self.layer = RecurrentState(name=name, scan=(heads.size, head_size, head_size))
        features = heads.size * head_size
        self._rule = ScanRule(num_groups=heads.size, queries=0, keys=features, values=2 * features)

    def forward(self, hidden_TD: Tensor, rotation: Rotation | None, context: ForwardContext) -> Tensor:
        hidden_TD, of_all = context.whole(hidden_TD), context.of_all_tokens()
        mixed_TX = silu(self.qkv_proj(hidden_TD, of_all))
        gate_TX = self.output_gate(hidden_TD, of_all)
        scanned_TX = scan(self.layer, mixed_TX, mixed_TX, context, self._rule, ScanParameters(self.decay_log))
        normed_TX = self.norm(scanned_TX, gate_TX, of_all)
        return self.out_proj(output_rows(normed_TX, context), context)  # type: ignore[no-any-return]


def slopes(num_heads: int, layer: int, num_layers: int) -> Tensor:
    """Slopes of a layer's heads, float32 [H]: those of ALiBi, smaller in later layers."""
    base = 1 / (2 ** (8 / num_heads))
    exponents_H = torch.arange(num_heads, dtype=torch.int64, device="cpu") + 1
    factor = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    slopes_H: Tensor = base**exponents_H * factor
    return slopes_H.to(torch.float32)
