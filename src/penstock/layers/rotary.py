"""Rotary position embedding as a layer that all attention layers of a model share. Suffix: T tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.device.limits import memory_limit
from penstock.errors import OutOfMemory
from penstock.kernels.rotary import Rotation, gather_rotation, no_rotation, rotary_table
from penstock.layers.rope_scaling import RopeParameters, rope_frequencies
from penstock.observability.units import format_bytes

# Angles, cosines and sines exist at once.
_TABLES_WHILE_COMPUTED = 3

# Step input of a step with tokens whose rotation is not that of their position: the row of the table of each token,
# int64 [T].
ROTATION_ROWS = "rotation_rows"


class RotaryEmbedding(nn.Module):
    """Cosines and sines of all positions that an engine serves.

    The table is computed in float32 on the CPU, even for a model built on the meta device, and copied from there.
    """

    table: Tensor

    def __init__(self, rope: RopeParameters) -> None:
        super().__init__()
        num_bytes, total_bytes = 4 * rope.num_positions * rope.rotary_dim, memory_limit().total_bytes
        if num_bytes > total_bytes // _TABLES_WHILE_COMPUTED:
            raise OutOfMemory(
                f"Rotary embedding keeps {format_bytes(num_bytes)} for {rope.num_positions:,} positions "
                f"(max_position_embeddings={rope.max_position_embeddings} in config.json) of {rope.rotary_dim} "
                f"dimensions (head_dim), and this machine has {format_bytes(total_bytes)} of memory. Give a smaller "
                "max_model_len."
            )
        inv_freq, attention_scaling = rope_frequencies(rope)
        self.register_buffer("table", rotary_table(inv_freq, rope.num_positions, attention_scaling), persistent=False)

    def add_rows(self, num_rows: int) -> None:
        """Add rows to the table, whose values steps write before they name them in `ROTATION_ROWS`."""
        self.table = torch.cat([self.table, self.table.new_zeros(num_rows, self.table.shape[1])])

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> Rotation:
        """Rotation of heads at these positions; computed once per step, for all layers."""
        return gather_rotation(self.table, positions_T, dtype)


class LayerRotations(nn.Module):
    """The rotary embedding of every layer, in order; layers with equal parameters share one. None: a layer has none."""

    unrotated: Tensor

    def __init__(self, ropes: Sequence[RopeParameters | None]) -> None:
        super().__init__()
        distinct: list[RopeParameters] = []
        for rope in ropes:
            if rope is not None and rope not in distinct:
                distinct.append(rope)
        self.embeddings = nn.ModuleList(RotaryEmbedding(rope) for rope in distinct)
        self._embedding_of_layer = [None if rope is None else distinct.index(rope) for rope in ropes]
        self.register_buffer("unrotated", torch.empty(1, 0, dtype=torch.float32, device="cpu"), persistent=False)

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> list[Rotation | None]:
        """Rotation of heads at these positions, by layer."""
        rotations = [embedding(positions_T, dtype) for embedding in self.embeddings]
        none = None
        if None in self._embedding_of_layer:
            none = no_rotation(self.unrotated, positions_T.to(torch.int64), dtype)
        return [none if index is None else rotations[index] for index in self._embedding_of_layer]
