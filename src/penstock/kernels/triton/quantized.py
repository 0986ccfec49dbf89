"""Products with int8 and int4 weights in Triton, which dequantise the weight in registers.

`penstock.kernels.gpu_quantized` has the layout of packed weights and the specification. Suffixes: T rows (tokens),
I input features, O output features, G groups of input features, B bytes of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Bytes of a row of the weight in a tile, and input features of a tile of int4.
_TILE_BYTES = 128
# Rows from which the tiling does not change any more.
_MANY_ROWS = 64
# Elements of a program of `dequantize`.
_ELEMENTS = 1024


def quantized_linear(
    x_TI: Tensor,
    values_OB: Tensor,
    scales_OG: Tensor,
    zeros_OG: Tensor | None,
    group_size: int,
    bias_O: Tensor | None = None,
    *,
    is_invariant: bool = False,
) -> Tensor:
    """x @ weight^T + bias in float32, rounded to x's dtype: [T, O]. x is contiguous; zeros_OG: None for int8.

    is_invariant: the tiling of many rows for any number of them.
    """
    num_rows, num_inputs = x_TI.shape
    num_outputs, row_bytes = values_OB.shape
    result_TO = x_TI.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return result_TO
    num_groups = scales_OG.shape[1]
    has_one_scale = num_groups == 1 or group_size % _TILE_BYTES == 0
    tiling = _tiling(_MANY_ROWS if is_invariant else num_rows, x_TI.dtype, has_one_scale=has_one_scale)
    block_rows, block_outputs, num_warps, num_stages = tiling
    _product_kernel[(-(-num_outputs // block_outputs), -(-num_rows // block_rows))](
        x_TI,
        values_OB,
        scales_OG,
        scales_OG if zeros_OG is None else zeros_OG,
        result_TO if bias_O is None else bias_O,
        result_TO,
        num_rows,
        num_inputs,
        num_outputs,
        row_bytes,
        num_groups,
        group_size,
        IS_INT4=zeros_OG is not None,
        HAS_ONE_SCALE=has_one_scale,
        HAS_BIAS=bias_O is not None,
        ROWS=block_rows,
        OUTPUTS=block_outputs,
        TILE=_TILE_BYTES,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return result_TO


def _tiling(num_rows: int, dtype: torch.dtype, *, has_one_scale: bool) -> tuple[int, int, int, int]:
    """Rows and outputs of a tile, warps and stages, within 99 KiB of shared memory.

    Few rows: bound by reading the weight, so many programs. Scales of several groups in a tile take shared memory too.
    """
    if dtype is torch.float32:  # without tensor cores: operands take registers
        return (16, 32, 4, 2) if num_rows <= 16 else (32, 32, 4, 2)
    if num_rows <= 16:
        return 16, 32, 4, 4 if has_one_scale else 2
    if num_rows <= 32 or not has_one_scale:
        return (32, 64, 4, 3) if has_one_scale else (32, 32, 4, 2)
    return 64, 64, 4, 2


def dequantize(
    values_OB: Tensor,
    scales_OG: Tensor,
    zeros_OG: Tensor | None,
    group_size: int,
    num_inputs: int,
    dtype: torch.dtype,
    ids_R: Tensor | None = None,
) -> Tensor:
    """Dequantise all rows of a weight, or these: [R, I]. ids_R: int32 or int64, within the weight."""
    num_rows = values_OB.shape[0] if ids_R is None else ids_R.shape[0]
    result_RI = torch.empty(num_rows, num_inputs, dtype=dtype, device=values_OB.device)
    if num_rows == 0:
        return result_RI
    _dequantize_kernel[(num_rows, -(-num_inputs // _ELEMENTS))](
        values_OB,
        scales_OG,
        scales_OG if zeros_OG is None else zeros_OG,
        values_OB if ids_R is None else ids_R,
        result_RI,
        num_inputs,
        values_OB.shape[1],
        scales_OG.shape[1],
        group_size,
        IS_INT4=zeros_OG is not None,
        HAS_IDS=ids_R is not None,
        TILE=_TILE_BYTES,
        ELEMENTS=_ELEMENTS,
        num_warps=4,
    )
    return result_RI


@triton.jit
def _weights_of_group(integers, scales, zeros, feature, input_feature, num_groups, group_size):
    """int4 weights [inputs, outputs] in float32, where inputs may have different scales."""
    group = tl.minimum(input_feature // group_size, num_groups - 1)
    place = feature.to(tl.int64)[None, :] * num_groups + group[:, None]
    centred = integers.to(tl.float32) - tl.load(zeros + place).to(tl.float32)
    return centred * tl.load(scales + place)


@triton.jit
def _add_int4(
    total,
    integers,
    scales,
    zeros,
    feature,
    first_input,
    num_inputs,
    num_groups,
    group_size,
    x_row,
    is_row,
    HAS_ONE_SCALE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the products of TILE inputs, from `first_input` on, with int4 weights [TILE, outputs]."""
    column = first_input + tl.arange(0, TILE)
    rows = tl.load(x_row + column[None, :], mask=is_row[:, None] & (column < num_inputs)[None, :], other=0.0)
    if HAS_ONE_SCALE:
        place = feature.to(tl.int64) * num_groups + tl.minimum(first_input // group_size, num_groups - 1)
        centred = integers.to(tl.float32) - tl.load(zeros + place).to(tl.float32)[None, :]
        products = tl.dot(rows, centred.to(rows.dtype), input_precision="ieee")
        total += products * tl.load(scales + place)[None, :]
    else:
        weights = _weights_of_group(integers, scales, zeros, feature, column, num_groups, group_size)
        total = tl.dot(rows, weights.to(rows.dtype), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x,
    values,
    scales,
    zeros,
    bias,
    result,
    num_rows,
    num_inputs,
    num_outputs,
    row_bytes,
    num_groups,
    group_size,
    IS_INT4: tl.constexpr,
    HAS_ONE_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of rows and output features. A byte of int4 has two inputs that lie TILE apart."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # Outputs beyond the last repeat the last, and are not stored.
    feature = tl.minimum(output, num_outputs - 1)
    is_row = row < num_rows
    x_row = x + row.to(tl.int64)[:, None] * num_inputs
    weight_row = values + feature.to(tl.int64)[None, :] * row_bytes
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    offset = tl.arange(0, TILE)
    for start in range(0, row_bytes, TILE):
        byte = start + offset
        if IS_INT4:
            both = tl.load(weight_row + byte[:, None])
            for half in tl.static_range(2):
                integers = (both >> 4) if half == 1 else (both & 15)
                total = _add_int4(
                    total,
                    integers,
                    scales,
                    zeros,
                    feature,
                    2 * start + half * TILE,
                    num_inputs,
                    num_groups,
                    group_size,
                    x_row,
                    is_row,
                    HAS_ONE_SCALE,
                    TILE,
                )
        else:
            integers = tl.load(weight_row + byte[:, None], mask=(byte < row_bytes)[:, None], other=0)
            rows = tl.load(x_row + byte[None, :], mask=is_row[:, None] & (byte < num_inputs)[None, :], other=0.0)
            weights = integers.to(tl.int8, bitcast=True).to(tl.float32).to(rows.dtype)
            total = tl.dot(rows, weights, total, input_precision="ieee")
    if not IS_INT4:
        total *= tl.load(scales + feature)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + feature).to(tl.float32)[None, :]
    place = result + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(place, total.to(result.dtype.element_ty), mask=is_row[:, None] & (output < num_outputs)[None, :])


@triton.jit
def _dequantize_kernel(
    values,
    scales,
    zeros,
    ids,
    result,
    num_inputs,
    row_bytes,
    num_groups,
    group_size,
    IS_INT4: tl.constexpr,
    HAS_IDS: tl.constexpr,
    TILE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Some input features of one row."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_IDS:
        source = tl.load(ids + row).to(tl.int64)
    column = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_input = column < num_inputs
    if IS_INT4:
        within = column % (2 * TILE)
        place = source * row_bytes + (column // (2 * TILE)) * TILE + within % TILE
        both = tl.load(values + place, mask=is_input, other=0)
        group = source * num_groups + tl.minimum(column // group_size, num_groups - 1)
        integers = tl.where(within >= TILE, both >> 4, both & 15).to(tl.float32)
        weights = (integers - tl.load(zeros + group).to(tl.float32)) * tl.load(scales + group)
    else:
        integers = tl.load(values + source * row_bytes + column, mask=is_input, other=0)
        weights = integers.to(tl.int8, bitcast=True).to(tl.float32) * tl.load(scales + source)
    tl.store(result + row * num_inputs + column, weights.to(result.dtype.element_ty), mask=is_input)
