"""Rotary position embedding in Triton, in place. Suffixes: T tokens, H heads, D head size, R rotated dimensions."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Elements of a program's tile.
_TILE = 1024


def apply_rotary(heads_THD: Tensor, table_PR: Tensor, positions_T: Tensor) -> None:
    """Rotate the first R dimensions of every head, as `kernels.rotary.apply_rotary`.

    heads_THD: the last dimension contiguous. table_PR: `kernels.rotary.rotary_table`.
    """
    num_tokens, num_heads, _ = heads_THD.shape
    half = table_PR.shape[1] // 2
    if num_tokens == 0 or num_heads == 0 or half == 0:
        return
    half_padded = triton.next_power_of_2(half)
    heads_at_once = min(triton.next_power_of_2(num_heads), max(1, _TILE // half_padded))
    _rotary_kernel[(num_tokens, triton.cdiv(num_heads, heads_at_once))](
        heads_THD,
        table_PR,
        positions_T,
        heads_THD.stride(0),
        heads_THD.stride(1),
        table_PR.stride(0),
        NUM_HEADS=num_heads,
        HALF=half,
        HALF_PADDED=half_padded,
        HEADS=heads_at_once,
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rotary_kernel(
    heads,
    table,
    positions,
    token_stride,
    head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF_PADDED)
    is_dim = dims < HALF
    mask = (head < NUM_HEADS)[:, None] & is_dim[None, :]
    row = table + tl.load(positions + token).to(tl.int64) * table_stride
    cos = tl.load(row + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    place = heads + token * token_stride + head[:, None] * head_stride + dims[None, :]
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    # All of the tile is read before any of it is overwritten.
    tl.debug_barrier()
    tl.store(place, (first * cos - second * sin).to(heads.dtype.element_ty), mask=mask)
    tl.store(place + HALF, (second * cos + first * sin).to(heads.dtype.element_ty), mask=mask)
