"""Writes to a paged KV cache in Triton, alone or with the norm and the rotation of query and key heads before.

A cache is [num_blocks, block_size, K, D], of any strides but the last; a slot is a flat KV position (block *
block_size + offset), negative for padding. Suffixes: T tokens, H query heads, K KV heads, D head size, R rotated
dimensions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.paged_attention import NO_SCALES, CacheScales

# Elements of a program's tile.
_TILE = 1024


def write_kv(
    key_TKD: Tensor,
    value_TKD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping_T: Tensor,
    scales: CacheScales = NO_SCALES,
) -> None:
    """Write keys and values to their slots; nothing for padding. The last dimension of each tensor is contiguous.

    scales: of an FP8 cache.
    """
    num_tokens, num_heads, head_size = key_TKD.shape
    if num_tokens == 0 or key_TKD.is_meta:
        return
    padded = triton.next_power_of_2(head_size)
    heads_at_once = min(triton.next_power_of_2(num_heads), max(1, _TILE // padded))
    _write_kernel[(num_tokens, triton.cdiv(num_heads, heads_at_once))](
        key_TKD,
        value_TKD,
        key_cache,
        value_cache,
        slot_mapping_T,
        *scales,
        *key_TKD.stride()[:2],
        *value_TKD.stride()[:2],
        *key_cache.stride()[:3],
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        HEAD_PADDED=padded,
        BLOCK_SIZE=key_cache.shape[1],
        HEADS=heads_at_once,
        num_warps=4,
    )


def rotate_and_write(
    qkv_TX: Tensor,
    num_heads: int,
    table_PR: Tensor,
    positions_T: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping_T: Tensor,
    norm: tuple[Tensor, float] | None = None,
    scales: CacheScales = NO_SCALES,
    *,
    norm_is_last: bool = False,
) -> Tensor:
    """Query heads [T, H, D] of the output of the QKV projection, [T, (H + 2 * K) * D], which is not changed.

    Query and key heads are normalised and rotated; keys and values are written to their slots.
    table_PR: `kernels.rotary.rotary_table`.
    norm: weight [H + K, D] and epsilon of an RMSNorm of each head. It rounds to the heads' dtype before the product
    with a weight of that dtype (`rms_norm`), and after the product with a weight in float32 (`rms_norm_rounded_last`).
    scales: of an FP8 cache. norm_is_last: heads are rotated before they are normalised.
    """
    num_tokens, (_, block_size, num_kv_heads, head_size) = qkv_TX.shape[0], key_cache.shape
    query_THD = qkv_TX.new_empty(num_tokens, num_heads, head_size)
    if num_tokens == 0 or qkv_TX.is_meta:
        return query_THD
    padded = triton.next_power_of_2(head_size)
    num_all = num_heads + 2 * num_kv_heads
    heads_at_once = min(triton.next_power_of_2(num_all), max(1, _TILE // padded))
    weight, eps = (table_PR, 0.0) if norm is None else norm
    _rotate_and_write_kernel[(num_tokens, triton.cdiv(num_all, heads_at_once))](
        qkv_TX,
        weight,
        table_PR,
        positions_T,
        slot_mapping_T,
        query_THD,
        key_cache,
        value_cache,
        eps,
        *scales,
        qkv_TX.stride(0),
        table_PR.stride(0),
        *key_cache.stride()[:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HEAD_PADDED=padded,
        ROTATED=table_PR.shape[1],
        BLOCK_SIZE=block_size,
        HEADS=heads_at_once,
        HAS_NORM=norm is not None,
        NORM_IS_LAST=norm_is_last,
        ROUNDS_FIRST=weight.dtype is qkv_TX.dtype,
        num_warps=4,
    )
    return query_THD


@triton.jit
def _as_stored(values, cache, scale):
    """See `penstock.kernels.paged_attention.as_stored`."""
    if cache.dtype.element_ty == tl.float8e4nv:
        values = tl.minimum(tl.maximum(tl.div_rn(values.to(tl.float32), scale), -448.0), 448.0)
    return values.to(cache.dtype.element_ty)


@triton.jit
def _offset_of_slot(slot, block_stride, position_stride, BLOCK_SIZE: tl.constexpr):
    """Offset of a slot in the cache, int64; of slot 0 for padding."""
    slot = tl.maximum(slot, 0)
    return (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * position_stride


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_scale,
    value_scale,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    position_stride,
    kv_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, HEAD_PADDED)[None, :]
    slot = tl.load(slot_mapping + token).to(tl.int64)
    mask = (head < NUM_HEADS) & (dims < HEAD_SIZE) & (slot >= 0)
    place = _offset_of_slot(slot, block_stride, position_stride, BLOCK_SIZE) + head * kv_head_stride + dims
    keys = tl.load(key + token * key_token_stride + head * key_head_stride + dims, mask=mask, other=0.0)
    values = tl.load(value + token * value_token_stride + head * value_head_stride + dims, mask=mask, other=0.0)
    tl.store(key_cache + place, _as_stored(keys, key_cache, key_scale), mask=mask)
    tl.store(value_cache + place, _as_stored(values, value_cache, value_scale), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _rotate_and_write_kernel(
    qkv,
    weight,
    table,
    positions,
    slot_mapping,
    query,
    key_cache,
    value_cache,
    eps,
    key_scale,
    value_scale,
    qkv_stride,
    table_stride,
    block_stride,
    position_stride,
    kv_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORM_IS_LAST: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """Some heads of one token: query heads, then key heads, then value heads."""
    HALF: tl.constexpr = ROTATED // 2
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, HEAD_PADDED)[None, :]
    # Each dimension is rotated together with its partner; those behind the rotated ones have none.
    is_rotated = dims < ROTATED
    partners = tl.where(dims < HALF, dims + HALF, tl.where(is_rotated, dims - HALF, dims))
    is_dim = dims < HEAD_SIZE
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & is_dim
    # All loads come before the reduction, so that one token waits for memory as few times as possible.
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    place = qkv + token * qkv_stride + head * HEAD_SIZE
    given = tl.load(place + dims, mask=mask, other=0.0).to(tl.float32)
    one = given
    other = tl.load(place + partners, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        is_normed = (head < NUM_HEADS + NUM_KV_HEADS) & is_dim
        weights = weight + head * HEAD_SIZE
        weight_of_one = tl.load(weights + dims, mask=is_normed, other=0.0).to(tl.float32)
        weight_of_other = tl.load(weights + partners, mask=is_normed, other=0.0).to(tl.float32)
    row = table + position * table_stride
    angles = tl.where(dims < HALF, dims, dims - HALF)
    cos = tl.load(row + angles, mask=is_rotated, other=1.0).to(tl.float32)
    sin = tl.load(row + HALF + angles, mask=is_rotated, other=0.0).to(tl.float32)
    if HAS_NORM and not NORM_IS_LAST:
        scale = tl.rsqrt(tl.sum(given * given, 1) / HEAD_SIZE + eps)[:, None]
        one = one * scale
        other = other * scale
        if ROUNDS_FIRST:
            one = one.to(qkv.dtype.element_ty).to(tl.float32)
            other = other.to(qkv.dtype.element_ty).to(tl.float32)
        one = one * weight_of_one
        other = other * weight_of_other
        one = one.to(qkv.dtype.element_ty).to(tl.float32)
        other = other.to(qkv.dtype.element_ty).to(tl.float32)
    rotated = one * cos + other * tl.where(dims < HALF, -sin, sin)
    if HAS_NORM and NORM_IS_LAST:
        rotated = rotated.to(qkv.dtype.element_ty).to(tl.float32)
        rotated = rotated * tl.rsqrt(tl.sum(rotated * rotated, 1) / HEAD_SIZE + eps)[:, None]
        if ROUNDS_FIRST:
            rotated = rotated.to(qkv.dtype.element_ty).to(tl.float32)
        rotated = rotated * weight_of_one
    tl.store(
        query + token * (NUM_HEADS * HEAD_SIZE) + head * HEAD_SIZE + dims,
        rotated.to(query.dtype.element_ty),
        mask=(head < NUM_HEADS) & is_dim,
    )
    cell = _offset_of_slot(slot, block_stride, position_stride, BLOCK_SIZE) + dims
    key_head = head - NUM_HEADS
    is_key = (key_head >= 0) & (key_head < NUM_KV_HEADS) & is_dim & (slot >= 0)
    tl.store(key_cache + cell + key_head * kv_head_stride, _as_stored(rotated, key_cache, key_scale), mask=is_key)
    value_head = key_head - NUM_KV_HEADS
    is_value = (value_head >= 0) & (value_head < NUM_KV_HEADS) & is_dim & (slot >= 0)
    stored = _as_stored(given, value_cache, value_scale)
    tl.store(value_cache + cell + value_head * kv_head_stride, stored, mask=is_value)
