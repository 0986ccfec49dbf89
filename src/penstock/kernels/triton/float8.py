"""FP8 quantisation of rows in Triton. Suffixes: T rows (tokens), I input features."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The largest FP8 number.
FLOAT8_MAX = 448.0
_ROW_BLOCK = 1024


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


@triton.jit
def _quantize_kernel(x, values, scales, row_stride, num_inputs, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise a row, whose largest magnitude becomes MOST."""
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
