"""Rotary position embedding as a layer that all attention layers of a model share. Suffix: T tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.kernels.rotary import Rotation, gather_rotation, rotary_table
from penstock.layers.rope_scaling import RopeParameters, rope_frequencies


class RotaryEmbedding(nn.Module):
    """Cosines and sines of all positions that an engine serves.

    The table is computed in float32 on the CPU, also while a model is built on the meta device, and moved from there.
    """

    table: Tensor

    def __init__(self, rope: RopeParameters) -> None:
        super().__init__()
        inv_freq, attention_scaling = rope_frequencies(rope)
        self.register_buffer("table", rotary_table(inv_freq, rope.num_positions, attention_scaling), persistent=False)

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> Rotation:
        """What turns the heads of tokens at these positions; once per step, for all layers."""
        return gather_rotation(self.table, positions_T, dtype)
