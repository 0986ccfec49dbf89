"""Quantisation grid of a checkpoint: scales, minimums and group order.

Weights are dequantised exactly, loaded as floats, and quantised to their own grid again, which restores the
checkpoint's integers. So models need not know names and layouts of quantised checkpoints.
Suffixes: O output features, I input features, G groups of input features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.errors import UnsupportedFeature
from penstock.kernels.quantized import QuantizedWeight
from penstock.layers.quantization.quantize import round_to_e2m1, round_to_int4, round_to_int8
from penstock.layers.weights import Part
from penstock.parallel import Share, groups_of_share


@dataclass(frozen=True, slots=True)
class Grid:
    """Quantisation grid of a weight.

    scales_OG: float32. minimums_OG: float32; None without, and 4 bits are floats (E2M1) then. scale_bytes: 2 if both
    are float16 values, else 4; E2M1 floats find their own. order_I: inputs by group, if groups are not contiguous.
    """

    bits: int
    group_size: int
    scales_OG: Tensor
    minimums_OG: Tensor | None = None
    scale_bytes: int = 4
    order_I: Tensor | None = None

    def of(self, part: Part | None, name: str) -> Grid:
        """Return the grid of a rank's shard of the weight `name`. Raises UnsupportedFeature if it splits groups."""
        if part is None:
            return self
        if part.dim == 0:
            return self._with(part)
        (share,) = part.shares
        if self.order_I is not None:
            raise UnsupportedFeature(
                f"{name}: its groups have inputs from anywhere (g_idx), so ranks cannot share its input features. Take "
                "a checkpoint without that (desc_act or actorder off), or use tensor_parallel_size=1."
            )
        num_groups = self.scales_OG.shape[1]
        if num_groups == 1:
            return replace(self, group_size=share.size)
        groups = groups_of_share(share, self.group_size, f"input features of {name}")
        return self._with(Part(1, (Share(groups.start, groups.size, num_groups),)))

    def _with(self, part: Part) -> Grid:
        minimums_OG = None if self.minimums_OG is None else part.of(self.minimums_OG)
        return replace(self, scales_OG=part.of(self.scales_OG), minimums_OG=minimums_OG)

    def round(self, weight_OI: Tensor) -> QuantizedWeight:
        """Quantise a weight that lies on this grid; its inputs are in grid order."""
        scales_OG = self.scales_OG.to(weight_OI.device)
        minimums_OG = None if self.minimums_OG is None else self.minimums_OG.to(weight_OI.device)
        if minimums_OG is None and self.bits == 4:
            return round_to_e2m1(weight_OI, scales_OG, self.group_size)
        if minimums_OG is None or self.bits == 8:
            return round_to_int8(weight_OI, scales_OG, self.group_size, self.scale_bytes, minimums_OG)
        return round_to_int4(weight_OI, scales_OG, minimums_OG, self.group_size, self.scale_bytes)


def join_grids(grids: Sequence[Grid], names: Sequence[str]) -> Grid:
    """Concatenate the grids of fused weights along the outputs. names: of the weights, for errors.

    Raises UnsupportedFeature if their bits, group sizes or orders differ.
    """
    first = grids[0]
    for name, grid in zip(names, grids, strict=True):
        same_order = (grid.order_I is None) == (first.order_I is None) and (
            grid.order_I is None or first.order_I is None or _are_alike(grid.order_I, first.order_I)
        )
        if (grid.bits, grid.group_size) != (first.bits, first.group_size) or not same_order:
            raise UnsupportedFeature(
                f"{name} and {names[0]} are computed together here, but their bits, groups or order of inputs (g_idx) "
                "differ. Take a checkpoint that quantizes them alike."
            )
    minimums = [grid.minimums_OG for grid in grids if grid.minimums_OG is not None]
    return replace(
        first,
        scales_OG=torch.cat([grid.scales_OG for grid in grids]),
        minimums_OG=torch.cat(minimums) if minimums else None,
    )


def _are_alike(order_I: Tensor, other_I: Tensor) -> bool:
    """Whether two orders are equal; on the meta device, whose values are not known, they count as such."""
    return order_I.is_meta or torch.equal(order_I, other_I)


def on_grid(values_OI: Tensor, grid: Grid) -> Tensor:
    """Dequantise to float32, with inputs in model order. values_OI: integers, by group."""
    spread = torch.arange(values_OI.shape[1]) // grid.group_size
    weight_OI = values_OI.float() * grid.scales_OG[:, spread]
    if grid.minimums_OG is not None:
        weight_OI += grid.minimums_OG[:, spread]
    if grid.order_I is None:
        return weight_OI
    return weight_OI.index_select(1, torch.argsort(grid.order_I))
