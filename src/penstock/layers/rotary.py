"""Rotary position embedding as a layer that all attention layers of a model share. Suffix: T tokens."""

from __future__ import annotations

from collections.abc import Sequence

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


class LayerRotations(nn.Module):
    """The rotary embedding of every layer, in order; layers with equal parameters share one."""

    def __init__(self, ropes: Sequence[RopeParameters]) -> None:
        super().__init__()
        distinct: list[RopeParameters] = []
        for rope in ropes:
            if rope not in distinct:
                distinct.append(rope)
        self.embeddings = nn.ModuleList(RotaryEmbedding(rope) for rope in distinct)
        self._embedding_of_layer = [distinct.index(rope) for rope in ropes]

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> list[Rotation]:
        """By layer, what turns the heads of tokens at these positions."""
        rotations = [embedding(positions_T, dtype) for embedding in self.embeddings]
        return [rotations[index] for index in self._embedding_of_layer]
