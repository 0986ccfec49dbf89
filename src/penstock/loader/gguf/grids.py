"""Quantisation grids of GGUF's block types: scales and minimums, read from the blocks.

The integers follow from the dequantised values and the grid, so types differ here only in where their scales are.
Suffixes: O output features, G groups of input features, B bytes of a block, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.quantized import HALF_GROUP
from penstock.loader.quantized.grid import Grid

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
# Values that 8 bits beside a minimum have.
_MOST_VALUES = 128
# Exponent of the scale 1 in MXFP4.
_E8M0_BIAS = 127


@dataclass(frozen=True, slots=True)
class BlockType:
    """Block type. bits: of the kernels for it. block_size: weights of a block, of group_size each.

    read: scales and minimums of blocks, float32 [N, G]; None for no minimums. lowest, highest: integers of a type where
    a weight is an integer times the scale. scale_bytes: 2 if scales and minimums are float16 values. is_float: the
    kernels take these integers as floats of 4 bits, and there are no minimums.
    """

    bits: int
    block_size: int
    group_size: int
    read: Callable[[Bytes], tuple[Floats, Floats | None]]
    lowest: int | None = None
    highest: int = 0
    scale_bytes: int = 4
    is_float: bool = False


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """Grid of a tensor of a block type."""

    grid: Grid
    type: BlockType


def grid_of(blocks: Bytes, shape: Sequence[int], type_: BlockType) -> BlockGrid:
    """Read the grid of a matrix. blocks: uint8 [bytes], rows one after another."""
    scales, minimums = type_.read(blocks.reshape(shape[0] * shape[1] // type_.block_size, -1))

    def per_output(values: Floats) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(shape[0], -1)

    grid = Grid(
        type_.bits,
        type_.group_size,
        per_output(scales),
        None if minimums is None else per_output(minimums),
        type_.scale_bytes,
    )
    return BlockGrid(grid, type_)


def grid_without_memory(shape: Sequence[int], type_: BlockType) -> BlockGrid:
    """Grid of a matrix on the meta device."""
    scales_OG = torch.empty(shape[0], shape[1] // type_.group_size, device="meta")
    has_minimums = (type_.bits == 4 and not type_.is_float) or type_.lowest is None
    return BlockGrid(
        Grid(type_.bits, type_.group_size, scales_OG, scales_OG if has_minimums else None, type_.scale_bytes), type_
    )


def alike(grids: Sequence[BlockGrid]) -> list[Grid] | None:
    """Express grids of several types in one format of 8 bits, exactly; None if there is none. Equal ones stay."""
    if all(grid.type is grids[0].type for grid in grids):
        return [grid.grid for grid in grids]
    if all(grid.type.lowest is not None for grid in grids):
        return [_in_groups_of_half(grid.grid, None) for grid in grids]
    if any(grid.type.lowest is not None and _num_values(grid.type) > _MOST_VALUES for grid in grids):
        return None
    return [_in_groups_of_half(grid.grid, _minimums(grid)) for grid in grids]


def _num_values(type_: BlockType) -> int:
    return 0 if type_.lowest is None else type_.highest - type_.lowest + 1


def _minimums(grid: BlockGrid) -> Tensor:
    if grid.grid.minimums_OG is not None:
        return grid.grid.minimums_OG
    assert grid.type.lowest is not None, "a type without minimums has integers"
    return grid.grid.scales_OG * grid.type.lowest


def _in_groups_of_half(grid: Grid, minimums_OG: Tensor | None) -> Grid:
    repeats = grid.group_size // HALF_GROUP
    return replace(
        grid,
        bits=8,
        group_size=HALF_GROUP,
        scales_OG=grid.scales_OG.repeat_interleave(repeats, dim=1),
        minimums_OG=None if minimums_OG is None else minimums_OG.repeat_interleave(repeats, dim=1),
        scale_bytes=4,
    )


def _float16(blocks_NB: Bytes, begin: int) -> Floats:
    return blocks_NB[:, begin : begin + 2].copy().view(np.float16).astype(np.float32)


def _scale(begin: int, lowest: int | None = None) -> Callable[[Bytes], tuple[Floats, Floats | None]]:
    """Scale at a byte. lowest: integer of the minimum, if it has one."""

    def read(blocks_NB: Bytes) -> tuple[Floats, Floats | None]:
        scales = _float16(blocks_NB, begin)
        return scales, None if lowest is None else scales * np.float32(lowest)

    return read


def _scale_and_minimum(blocks_NB: Bytes) -> tuple[Floats, Floats]:
    return _float16(blocks_NB, 0), _float16(blocks_NB, 2)


def _scales_of_6_bits(blocks_NB: Bytes) -> tuple[Floats, Floats]:
    """Q4_K and Q5_K: eight scales and minimums of 6 bits, times one float16 each; the last four are in two pieces."""
    first, second, both = (blocks_NB[:, begin : begin + 4] for begin in (4, 8, 12))
    scales = np.concatenate([first & 63, (both & 15) | (first >> 6 << 4)], axis=1)
    minimums = np.concatenate([second & 63, (both >> 4) | (second >> 6 << 4)], axis=1)
    return _float16(blocks_NB, 0) * scales, -(_float16(blocks_NB, 2) * minimums)


def _signed_scales(blocks_NB: Bytes) -> tuple[Floats, None]:
    """Q6_K: sixteen signed bytes, times one float16."""
    return _float16(blocks_NB, 208) * blocks_NB[:, 192:208].view(np.int8), None


def _scales_of_4_bits(blocks_NB: Bytes) -> tuple[Floats, Floats]:
    """Q2_K: sixteen scales and minimums of 4 bits, times one float16 each."""
    pairs = blocks_NB[:, :16]
    return _float16(blocks_NB, 80) * (pairs & 15), -(_float16(blocks_NB, 82) * (pairs >> 4))


def _offset_scales(blocks_NB: Bytes) -> tuple[Floats, None]:
    """Q3_K: sixteen scales of 6 bits less 32, in two pieces, times one float16."""
    low, high = blocks_NB[:, 96:104], blocks_NB[:, 104:108]
    low = np.concatenate([low & 15, low >> 4], axis=1)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    return _float16(blocks_NB, 108) * ((low | high << 4).astype(np.int8) - np.int8(32)), None


def _power_of_two(blocks_NB: Bytes) -> tuple[Floats, None]:
    """MXFP4: the exponent of a power of two (E8M0), halved since the integers are twice the numbers."""
    return np.ldexp(np.float32(1), blocks_NB[:, :1].astype(np.int32) - _E8M0_BIAS - 1), None


# Types with products of their own blocks, by ggml's number.
BLOCK_TYPES: Mapping[int, BlockType] = {
    2: BlockType(4, 32, 32, _scale(0, -8), lowest=-8, highest=7, scale_bytes=2),  # Q4_0
    3: BlockType(4, 32, 32, _scale_and_minimum, scale_bytes=2),  # Q4_1
    6: BlockType(8, 32, 32, _scale(0), lowest=-16, highest=15, scale_bytes=2),  # Q5_0
    7: BlockType(8, 32, 32, _scale_and_minimum, scale_bytes=2),  # Q5_1
    8: BlockType(8, 32, 32, _scale(0), lowest=-128, highest=127, scale_bytes=2),  # Q8_0
    10: BlockType(8, 256, 16, _scales_of_4_bits),  # Q2_K
    11: BlockType(8, 256, 16, _offset_scales, lowest=-4, highest=3),  # Q3_K
    12: BlockType(4, 256, 32, _scales_of_6_bits),  # Q4_K
    13: BlockType(8, 256, 32, _scales_of_6_bits),  # Q5_K
    14: BlockType(8, 256, 16, _signed_scales, lowest=-32, highest=31),  # Q6_K
    20: BlockType(8, 32, 32, _scale(0), lowest=-127, highest=113, scale_bytes=2),  # IQ4_NL
    39: BlockType(4, 32, 32, _power_of_two, lowest=-12, highest=12, is_float=True),  # MXFP4
}
