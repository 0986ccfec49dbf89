"""Products with FP8 weights in Triton, which dequantise the weight in registers, and FP8 quantisation of rows.

Suffixes: T rows (tokens), I input features, O output features, C blocks of input features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The largest FP8 number.
FLOAT8_MAX = 448.0
_ROW_BLOCK = 1024
# Rows from which the tiling does not change any more.
_MANY_ROWS = 64


def float8_linear(
    x_TI: Tensor,
    values_OI: Tensor,
    scales_OC: Tensor,
    block_size: int,
    bias_O: Tensor | None = None,
    *,
    is_invariant: bool = False,
) -> Tensor:
    """x @ (values * scales)^T + bias in float32, rounded to x's dtype: [T, O]. x is contiguous.

    values_OI: float8_e4m3fn. scales_OC: float32, one per output feature and block of `block_size` input features.
    is_invariant: the tiling of many rows for any number of them.
    """
    num_rows, num_inputs = x_TI.shape
    num_outputs = values_OI.shape[0]
    result_TO = x_TI.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return result_TO
    rows, outputs, num_warps, num_stages = _tiling(_MANY_ROWS if is_invariant else num_rows, x_TI.dtype)
    # A tile of inputs has one scale per output.
    inputs = 64 if block_size % 64 == 0 or block_size >= num_inputs else 32
    _product_kernel[(triton.cdiv(num_outputs, outputs), triton.cdiv(num_rows, rows))](
        x_TI,
        values_OI,
        scales_OC,
        result_TO if bias_O is None else bias_O,
        result_TO,
        num_rows,
        num_inputs,
        num_outputs,
        scales_OC.shape[1],
        block_size,
        ROWS=rows,
        OUTPUTS=outputs,
        INPUTS=inputs,
        HAS_BIAS=bias_O is not None,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return result_TO


def _tiling(num_rows: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows and outputs of a tile, warps and stages, within 99 KiB of shared memory."""
    if dtype is torch.float32:  # without tensor cores: operands take registers
        return (16, 32, 4, 2) if num_rows <= 16 else (32, 32, 4, 2)
    return (16, 32, 4, 4) if num_rows <= 16 else (32, 64, 4, 3) if num_rows <= 32 else (64, 64, 4, 3)


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to FP8 with one scale each: float8_e4m3fn [T, I], and float32 [T, 1]. A zero row has scale 1."""
    num_rows, num_inputs = x_TI.shape
    values_TI = torch.empty(num_rows, num_inputs, dtype=torch.float8_e4m3fn, device=x_TI.device)
    scales_T1 = torch.empty(num_rows, 1, dtype=torch.float32, device=x_TI.device)
    if num_rows:
        _quantize_kernel[(num_rows,)](
            x_TI, values_TI, scales_T1, x_TI.stride(0), num_inputs, MOST=FLOAT8_MAX, BLOCK=_ROW_BLOCK, num_warps=4
        )
    return values_TI, scales_T1


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x,
    values,
    scales,
    bias,
    result,
    num_rows,
    num_inputs,
    num_outputs,
    scales_stride,
    block_size,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """A tile of rows and output features."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, INPUTS)
    # Outputs beyond the last repeat the last, and are not stored.
    feature = tl.minimum(output, num_outputs - 1)
    is_row = row < num_rows
    x_row = x + row.to(tl.int64)[:, None] * num_inputs
    weight_row = values + feature.to(tl.int64)[None, :] * num_inputs
    scale_row = scales + feature * scales_stride
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, num_inputs, INPUTS):
        place = start + column
        is_input = place < num_inputs
        rows = tl.load(x_row + place[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        weights = tl.load(weight_row + place[:, None], mask=is_input[:, None], other=0.0).to(rows.dtype)
        scale = tl.load(scale_row + start // block_size)
        total += tl.dot(rows, weights, input_precision="ieee") * scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias + feature).to(tl.float32)[None, :]
    place = result + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(place, total.to(result.dtype.element_ty), mask=is_row[:, None] & (output < num_outputs)[None, :])


@triton.jit
def _quantize_kernel(x, values, scales, row_stride, num_inputs, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """One row: its largest magnitude becomes MOST."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_inputs, BLOCK):
        column = start + offsets
        value = tl.load(x + row * row_stride + column, mask=column < num_inputs, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(value))
    largest = tl.max(most, 0)
    scale = tl.where(largest > 0.0, largest / MOST, 1.0)
    tl.store(scales + row, scale)
    for start in range(0, num_inputs, BLOCK):
        column = start + offsets
        mask = column < num_inputs
        value = tl.load(x + row * row_stride + column, mask=mask, other=0.0).to(tl.float32) / scale
        value = tl.minimum(tl.maximum(value, -MOST), MOST)
        tl.store(values + row * num_inputs + column, value.to(values.dtype.element_ty), mask=mask)
