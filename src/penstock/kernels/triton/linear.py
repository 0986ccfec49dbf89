"""Products of few rows with a weight in Triton, which are bound by reading the weight.

Suffixes: T rows (tokens), I input features, O output features.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16)
# Rows up to which the products beat cuBLAS, and that the kernels take.
_MAX_ROWS, _MOST_ROWS = 4, 16
# Elements of 16 bytes, the widest load.
_VECTOR = 8


@dataclass(frozen=True, slots=True)
class Tiling:
    """Launch parameters: a program computes `outputs` output features, `inputs` input features at a time.

    num_stages: tiles of the weight in flight; 1 loads into registers. dots: products on tensor cores; otherwise
    products of elements, where `inputs` is 256 * num_warps or more, so that the threads of a program load consecutive
    vectors.
    """

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int = 1
    dots: bool = False


# For shapes that cuBLAS is better at.
_OTHERS = Tiling(64, 128, num_warps=4, num_stages=4, dots=True)


@functools.cache
def choose_tiling(num_rows: int, num_inputs: int, num_outputs: int) -> Tiling | None:
    """Tiling of a product of this shape; None where cuBLAS is the better choice."""
    if num_rows > _MAX_ROWS or num_inputs < 512 or num_outputs < 512:
        return None
    # Few output features: most of a row in flight at once. Many: more work per program.
    inputs = 512 if num_inputs < 1024 else 2048 if num_outputs <= 2048 and num_inputs % 2048 == 0 else 1024
    return Tiling(8 if num_outputs > 2048 and num_rows <= 2 else 4, inputs, num_warps=inputs // 256)


def takes(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> bool:
    """Whether `skinny_linear` supports these tensors: few rows of one 16-bit dtype, with contiguous 16-byte vectors."""
    return (
        x_TI.dim() == 2
        and 0 < x_TI.shape[0] <= _MOST_ROWS
        and x_TI.dtype in _DTYPES
        and weight_OI.dtype is x_TI.dtype
        and x_TI.shape[1] % _VECTOR == 0
        and x_TI.is_contiguous()
        and weight_OI.is_contiguous()
        and (bias_O is None or (bias_O.dtype is x_TI.dtype and bias_O.is_contiguous()))
    )


def skinny_linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, tiling: Tiling | None = None
) -> Tensor:
    """x @ weight^T + bias in float32, rounded to x's dtype: [T, O]. The tensors are those of `takes`.

    tiling: None chooses it from the shapes.
    """
    num_rows, num_inputs = x_TI.shape
    num_outputs = weight_OI.shape[0]
    if tiling is None:
        tiling = choose_tiling(num_rows, num_inputs, num_outputs) or _OTHERS
    result_TO = x_TI.new_empty(num_rows, num_outputs)
    kernel = _dot_kernel if tiling.dots else _elements_kernel
    kernel[(-(-num_outputs // tiling.outputs),)](
        x_TI,
        weight_OI,
        result_TO if bias_O is None else bias_O,
        result_TO,
        num_rows,
        num_inputs,
        num_outputs,
        ROWS=_MOST_ROWS if tiling.dots else 1 << (num_rows - 1).bit_length(),
        BLOCK_O=tiling.outputs,
        BLOCK_I=tiling.inputs,
        STAGES=tiling.num_stages,
        IS_EVEN=num_inputs % tiling.inputs == 0,
        HAS_BIAS=bias_O is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return result_TO


@triton.jit(do_not_specialize=["num_rows"])
def _elements_kernel(
    x,
    weight,
    bias,
    result,
    num_rows,
    num_inputs,
    num_outputs,
    ROWS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Some output features of all rows, by products of elements.

    Loads of the weight and of the rows have one layout: the threads of a program are side by side in the input
    features. A thread adds its vector's products at once, so that it keeps one sum per output feature and row.
    """
    VECTOR: tl.constexpr = 8
    feature = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_I)[None, None, :]
    # Outputs and rows beyond the last repeat the last, and are not stored.
    weight_row = weight + tl.minimum(feature, num_outputs - 1).to(tl.int64)[:, None, None] * num_inputs
    x_row = x + tl.minimum(row, num_rows - 1)[None, :, None] * num_inputs
    sums = tl.zeros([BLOCK_O, ROWS, BLOCK_I // VECTOR], tl.float32)
    for start in tl.range(0, num_inputs, BLOCK_I, num_stages=STAGES):
        place = start + column
        if IS_EVEN:
            weights = tl.load(weight_row + place, eviction_policy="evict_first")
            values = tl.load(x_row + place, eviction_policy="evict_last")
        else:
            weights = tl.load(weight_row + place, mask=place < num_inputs, other=0.0, eviction_policy="evict_first")
            values = tl.load(x_row + place, mask=place < num_inputs, other=0.0, eviction_policy="evict_last")
        products = weights.to(tl.float32) * values.to(tl.float32)
        sums += tl.sum(tl.reshape(products, [BLOCK_O, ROWS, BLOCK_I // VECTOR, VECTOR]), 3)
    total = tl.sum(sums, 2)
    is_feature = feature < num_outputs
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    place = result + row[None, :] * num_outputs + feature[:, None]
    tl.store(place, total.to(result.dtype.element_ty), mask=is_feature[:, None] & (row < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _dot_kernel(
    x,
    weight,
    bias,
    result,
    num_rows,
    num_inputs,
    num_outputs,
    ROWS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Some output features of all rows, on tensor cores: the weight is the left operand."""
    feature = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_I)
    weight_row = weight + tl.minimum(feature, num_outputs - 1).to(tl.int64)[:, None] * num_inputs
    x_row = x + tl.minimum(row, num_rows - 1)[None, :] * num_inputs
    total = tl.zeros([BLOCK_O, ROWS], tl.float32)
    for start in tl.range(0, num_inputs, BLOCK_I, num_stages=STAGES):
        place = start + column
        if IS_EVEN:
            weights = tl.load(weight_row + place[None, :], eviction_policy="evict_first")
            values = tl.load(x_row + place[:, None], eviction_policy="evict_last")
        else:
            is_input = place < num_inputs
            weights = tl.load(
                weight_row + place[None, :], mask=is_input[None, :], other=0.0, eviction_policy="evict_first"
            )
            values = tl.load(x_row + place[:, None], mask=is_input[:, None], other=0.0, eviction_policy="evict_last")
        total = tl.dot(weights, values, total)
    is_feature = feature < num_outputs
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    place = result + row[None, :] * num_outputs + feature[:, None]
    tl.store(place, total.to(result.dtype.element_ty), mask=is_feature[:, None] & (row < num_rows)[None, :])
