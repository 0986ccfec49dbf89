"""RMSNorm in Triton. Suffixes: T tokens, H heads, D the normalised dimension."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_SIZE = 16384
# Elements of the tile of a program, where several heads fit.
_TILE = 2048


def takes(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> bool:
    """Whether the kernel supports these tensors.

    x: [T, D] or [T, H, D], with a contiguous last dimension. weight: [D] or, for heads, [H, D]. residual: like x.
    """
    if x.dtype not in _DTYPES or weight.dtype not in _DTYPES or x.dim() not in (2, 3):
        return False
    if residual is not None and (residual.dtype, residual.shape, residual.stride(-1)) != (x.dtype, x.shape, 1):
        return False
    size = x.shape[-1]
    weight_fits = weight.shape == (size,) or (x.dim() == 3 and weight.shape == x.shape[1:])
    return weight_fits and weight.is_contiguous() and x.stride(-1) == 1 and 0 < size <= _MAX_SIZE


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    rounds_last: bool = False,
) -> Tensor:
    """`kernels.norm.rms_norm`, or `rms_norm_rounded_last`: contiguous, in x's shape. The tensors are those of `takes`.

    residual: x becomes x + residual first, in place.
    """
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not normed.numel():
        return normed
    num_heads, size = (1 if x.dim() == 2 else x.shape[1]), x.shape[-1]
    block = triton.next_power_of_2(size)
    heads_at_once = min(triton.next_power_of_2(num_heads), max(1, _TILE // block))
    tile = block * heads_at_once
    _rms_norm[(x.shape[0], triton.cdiv(num_heads, heads_at_once))](
        x,
        x if residual is None else residual,
        weight,
        normed,
        x.stride(0),
        0 if x.dim() == 2 else x.stride(1),
        0 if residual is None else residual.stride(0),
        0 if residual is None or x.dim() == 2 else residual.stride(1),
        size if weight.dim() == 2 else 0,
        float(eps),
        float(weight_offset),
        NUM_HEADS=num_heads,
        SIZE=size,
        HEADS=heads_at_once,
        BLOCK=block,
        ADDS=residual is not None,
        ROUNDS_LAST=rounds_last,
        num_warps=4 if tile <= 2048 else 8 if tile <= 8192 else 16,
    )
    return normed


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    x_token_stride,
    x_head_stride,
    residual_token_stride,
    residual_head_stride,
    weight_head_stride,
    eps,
    weight_offset,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    ROUNDS_LAST: tl.constexpr,
):
    """Some heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    head_H1 = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column_1D = tl.arange(0, BLOCK)[None, :]
    mask_HD = (head_H1 < NUM_HEADS) & (column_1D < SIZE)

    x_HD_ptr = x_ptr + token * x_token_stride + head_H1 * x_head_stride + column_1D
    x_HD = tl.load(x_HD_ptr, mask=mask_HD, other=0.0)
    # Loaded before the reduction, so that one row waits for memory once.
    weight_HD = tl.load(weight_ptr + head_H1 * weight_head_stride + column_1D, mask=mask_HD, other=0.0).to(tl.float32)
    wide_HD = x_HD.to(tl.float32)
    if ADDS:
        residual_HD_ptr = residual_ptr + token * residual_token_stride + head_H1 * residual_head_stride + column_1D
        sum_HD = wide_HD + tl.load(residual_HD_ptr, mask=mask_HD, other=0.0).to(tl.float32)
        rounded_HD = sum_HD.to(x_ptr.dtype.element_ty)
        tl.store(x_HD_ptr, rounded_HD, mask=mask_HD)
        wide_HD = rounded_HD.to(tl.float32)

    mean_H = tl.sum(wide_HD * wide_HD, axis=1) / SIZE
    normed_HD = wide_HD * tl.rsqrt(mean_H + eps)[:, None]
    if not ROUNDS_LAST:
        normed_HD = normed_HD.to(x_ptr.dtype.element_ty).to(tl.float32)
    normed_HD = normed_HD * (weight_HD + weight_offset)
    normed_HD_ptr = normed_ptr + (token * NUM_HEADS + head_H1) * SIZE + column_1D
    tl.store(normed_HD_ptr, normed_HD.to(x_ptr.dtype.element_ty), mask=mask_HD)
