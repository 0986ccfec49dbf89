"""Batch-invariant products with a weight in Triton: a row's bits do not depend on the other rows, nor on their number.

A tile's shape follows from the weight and the dtype alone, and its inputs are added in one order by one program: no
split-K, and no other instruction for few rows. cuBLAS chooses both by the number of rows.

Suffixes: H heads, T rows (tokens), I input features, O output features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tiles of rows whose programs share the weight's tiles in the L2 cache.
_GROUP = 8


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows, output and input features of a tile, and the launch parameters of its program."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def choose_tiling(num_outputs: int, dtype: torch.dtype) -> Tiling:
    """Tiling of all products with so many output features, within 99 KiB of shared memory.

    Narrow tiles for few outputs, so that a decode step has enough programs to read the weight.
    """
    if dtype is torch.float32:  # without tensor cores: operands take registers
        return Tiling(32, 32, 32, num_warps=4, num_stages=2)
    if num_outputs >= 16384:
        return Tiling(64, 128, 64, num_warps=4, num_stages=3)
    return Tiling(64, 64 if num_outputs >= 8192 else 32, 128, num_warps=4, num_stages=3)


def invariant_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias in float32, rounded to x's dtype: [T, O]. Tensors of one dtype, of any strides."""
    result_TO = x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])
    _launch(x_TI.unsqueeze(0), weight_OI.unsqueeze(0), result_TO.unsqueeze(0), bias_O)
    return result_TO


def invariant_products(x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
    """Products of each head with its weight, as `invariant_linear`: [T, H, O]."""
    num_rows, num_heads, _ = x_THI.shape
    result_THO = x_THI.new_empty(num_rows, num_heads, weight_HOI.shape[1])
    _launch(x_THI.transpose(0, 1), weight_HOI, result_THO.transpose(0, 1), None)
    return result_THO


def _launch(x_HTI: Tensor, weight_HOI: Tensor, result_HTO: Tensor, bias_O: Tensor | None) -> None:
    num_heads, num_rows, num_inputs = x_HTI.shape
    num_outputs = weight_HOI.shape[1]
    if num_rows == 0 or x_HTI.is_meta:
        return
    tiling = choose_tiling(num_outputs, x_HTI.dtype)
    _product_kernel[(-(-num_rows // tiling.rows) * -(-num_outputs // tiling.outputs), num_heads)](
        x_HTI,
        weight_HOI,
        result_HTO if bias_O is None else bias_O,
        result_HTO,
        num_rows,
        num_inputs,
        num_outputs,
        *x_HTI.stride(),
        *weight_HOI.stride(),
        *result_HTO.stride()[:2],
        ROWS=tiling.rows,
        OUTPUTS=tiling.outputs,
        INPUTS=tiling.inputs,
        GROUP=_GROUP,
        HAS_BIAS=bias_O is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


@triton.jit(do_not_specialize=["num_rows", "x_head_stride", "x_row_stride"])
def _product_kernel(
    x,
    weight,
    bias,
    result,
    num_rows,
    num_inputs,
    num_outputs,
    x_head_stride,
    x_row_stride,
    x_stride,
    weight_head_stride,
    weight_row_stride,
    weight_stride,
    result_head_stride,
    result_row_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Batch-invariant product: a tile of one head.

    Programs with the same outputs follow each other, in groups of GROUP tiles of rows.
    """
    tiles_of_rows = tl.cdiv(num_rows, ROWS)
    programs_of_group = GROUP * tl.cdiv(num_outputs, OUTPUTS)
    first = tl.program_id(0) // programs_of_group * GROUP
    size = tl.minimum(tiles_of_rows - first, GROUP)
    within = tl.program_id(0) % programs_of_group
    row = (first + within % size) * ROWS + tl.arange(0, ROWS)
    output = within // size * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    head = tl.program_id(1).to(tl.int64)
    # Rows and outputs beyond the last repeat the last, and are not stored.
    x_row = x + head * x_head_stride + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * x_row_stride
    feature = tl.minimum(output, num_outputs - 1)
    weight_row = weight + head * weight_head_stride + feature.to(tl.int64)[None, :] * weight_row_stride
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, num_inputs, INPUTS):
        feature_in = start + column
        is_input = feature_in < num_inputs
        rows = tl.load(x_row + feature_in[None, :] * x_stride, mask=is_input[None, :], other=0.0)
        weights = tl.load(weight_row + feature_in[:, None] * weight_stride, mask=is_input[:, None], other=0.0)
        total = tl.dot(rows, weights, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + feature).to(tl.float32)[None, :]
    place = result + head * result_head_stride + row.to(tl.int64)[:, None] * result_row_stride + output[None, :]
    tl.store(place, total.to(result.dtype.element_ty), mask=(row < num_rows)[:, None] & (output < num_outputs)[None, :])
