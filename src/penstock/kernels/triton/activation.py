"""Gated activation functions in Triton. Suffixes: T tokens, I intermediate size."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def gate_and_mul(activation: str, gate_up_TI: Tensor) -> Tensor:
    """activation(gate) * up: [T, I] for [T, 2 * I] with contiguous rows. activation: "silu", "gelu" or "gelu_tanh"."""
    num_tokens, size = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    result_TI = gate_up_TI.new_empty(num_tokens, size)
    if result_TI.numel():
        _gate_and_mul[(num_tokens, triton.cdiv(size, _BLOCK))](
            gate_up_TI, result_TI, gate_up_TI.stride(0), size, ACTIVATION=activation, BLOCK=_BLOCK, num_warps=4
        )
    return result_TI


def clamped_swiglu(gate_up_TI: Tensor, alpha: float, limit: float) -> Tensor:
    """`kernels.activation.ClampedSwiglu`: [T, I] for [T, 2 * I] with contiguous rows."""
    num_tokens, size = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    result_TI = gate_up_TI.new_empty(num_tokens, size)
    if result_TI.numel():
        grid = num_tokens, triton.cdiv(size, _BLOCK)
        _clamped_swiglu[grid](
            gate_up_TI, result_TI, gate_up_TI.stride(0), size, alpha, limit, BLOCK=_BLOCK, num_warps=4
        )
    return result_TI


@triton.jit
def gated(gate, up, alpha, limit, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """activation(gate) * up of float32 values. An activation with a plain product rounds the gate to `dtype` before it.

    alpha, limit: of "clamped_swiglu" alone.
    """
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        if ACTIVATION == "silu":
            active = gate / (1.0 + tl.exp(-gate))
        elif ACTIVATION == "gelu":
            active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
        else:
            # 0.5 * (1 + tanh(u)) is the logistic function of 2 u.
            doubled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            active = gate / (1.0 + tl.exp(-doubled))
        result = active.to(dtype).to(tl.float32) * up
    return result


@triton.jit
def _clamped_swiglu(gate_up_ptr, result_ptr, row_stride, size, alpha, limit, BLOCK: tl.constexpr):
    """A block of columns of a token, in float32."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate_ptr = gate_up_ptr + token * row_stride + column
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size, mask=mask, other=0.0).to(tl.float32)
    dtype = result_ptr.dtype.element_ty
    result = gated(gate, up, alpha, limit, dtype, "clamped_swiglu")
    tl.store(result_ptr + token * size + column, result.to(dtype), mask=mask)


@triton.jit
def _gate_and_mul(gate_up_ptr, result_ptr, row_stride, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """A block of columns of a token, in float32; the gate is rounded before the product, as in plain torch."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate_ptr = gate_up_ptr + token * row_stride + column
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size, mask=mask, other=0.0).to(tl.float32)
    dtype = result_ptr.dtype.element_ty
    result = gated(gate, up, 0.0, 0.0, dtype, ACTIVATION)
    tl.store(result_ptr + token * size + column, result.to(dtype), mask=mask)
