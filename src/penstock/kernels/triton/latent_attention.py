"""Split-KV attention over latents in Triton (MLA in its absorbed form): a position's value is a part of its key.

A program attends with some query heads of one token to one split of its positions, or to all; it reads each latent
once, for scores and sums. Splits are merged as in `penstock.kernels.triton.split_attention`.

Suffixes: T tokens of the step, R rows of the block table, H query heads, D key size, C latent size, B blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.attention_kernels import accumulate
from penstock.kernels.triton.paged_attention import Scores, choose_num_splits, merge_splits, padded_head
from penstock.kernels.triton.split_attention import (
    FIXED_SPLIT,
    add_split,
    merge_in_order,
    normalised,
    num_fixed_splits,
    partials_of_tokens,
)

# Query heads of a program.
_HEADS = 16


def latent_attention(
    query_THD: Tensor,
    cache: Tensor,
    block_table_RB: Tensor,
    query_start_loc: Tensor,
    seq_lens_R: Tensor,
    scale: float,
    latent_size: int,
    *,
    is_invariant: bool = False,
    num_splits: int | None = None,
) -> Tensor:
    """Causal attention of any number of queries per row, which are the row's last positions: [T, H, C].

    cache: [num_blocks, block_size, 1, D], keys whose last C elements are the values. query_start_loc: [R + 1], first
    token of each row. Tokens that belong to no row give zeros. num_splits: None chooses it from the shapes.
    is_invariant: splits of a fixed size, whatever their number.
    """
    num_tokens, num_heads, key_size = query_THD.shape
    output_THC = query_THD.new_zeros(num_tokens, num_heads, latent_size)
    if num_tokens == 0:
        return output_THC
    block_size = cache.shape[1]
    num_rows = min(seq_lens_R.shape[0], block_table_RB.shape[0], query_start_loc.shape[0] - 1)
    num_parts = triton.cdiv(num_heads, _HEADS)
    max_positions = block_table_RB.shape[1] * block_size
    if is_invariant:
        num_splits = num_fixed_splits(num_tokens * num_parts, max_positions, query_THD.device, num_splits)
    elif num_splits is None:
        num_splits = choose_num_splits(num_tokens, num_parts, max_positions, query_THD.device)
    partial, lse = partials_of_tokens(output_THC, num_splits)
    if query_THD.is_meta:
        return output_THC
    # Tiles of positions within 99 KiB of shared memory; latents are read twice as fast as they can be kept.
    tile, num_warps, num_stages = (16, 8, 1) if query_THD.dtype is torch.float32 else (32, 4, 2)
    _latent_kernel[(num_tokens, num_parts, num_splits)](
        query_THD,
        cache,
        block_table_RB,
        query_start_loc,
        seq_lens_R,
        output_THC,
        partial,
        lse,
        Scores.of(scale, None).inner,
        num_rows,
        num_splits,
        num_heads,
        *query_THD.stride()[:2],
        *cache.stride()[:2],
        block_table_RB.stride(0),
        HEADS=_HEADS,
        ROTARY=key_size - latent_size,
        ROTARY_PADDED=padded_head(key_size - latent_size),
        LATENT=latent_size,
        LATENT_PADDED=padded_head(latent_size),
        BLOCK_SIZE=block_size,
        TILE=tile,
        SPLIT_TILES=FIXED_SPLIT // tile if is_invariant else 0,
        IS_SPLIT=num_splits > 1,
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=not is_invariant,
    )
    if num_splits > 1:
        merge = merge_in_order if is_invariant else merge_splits
        merge(partial, lse, output_THC, None)
    return output_THC


@triton.jit
def _row_of_token(query_start_loc, token, num_rows):
    """The last row whose first token is not beyond this one."""
    low = token * 0
    high = token * 0 + num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc + middle).to(tl.int32) <= token:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(
    do_not_specialize=["num_rows", "num_splits", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "query_start_loc", "seq_lens"],
)
def _latent_kernel(
    query,
    cache,
    block_table,
    query_start_loc,
    seq_lens,
    output,
    partial,
    partial_lse,
    inner,
    num_rows,
    num_splits,
    num_heads,
    query_token_stride,
    query_head_stride,
    block_stride,
    position_stride,
    table_stride,
    HEADS: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """HEADS query heads of one token, and one split of its positions, or all. SPLIT_TILES: as of `_split_kernel`."""
    token = tl.num_programs(0) - 1 - tl.program_id(0)
    row = _row_of_token(query_start_loc, token, num_rows).to(tl.int64)
    first_token = tl.load(query_start_loc + row).to(tl.int32)
    num_tokens = tl.load(query_start_loc + row + 1).to(tl.int32) - first_token
    is_used = token - first_token < num_tokens
    # Positions that the token sees; none if it belongs to no row.
    end = tl.where(is_used, tl.load(seq_lens + row).to(tl.int32) - num_tokens + token - first_token + 1, 0)
    end_tile = (tl.maximum(end, 0) + TILE - 1) // TILE

    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = heads < num_heads
    rotary = tl.arange(0, ROTARY_PADDED)
    latent = tl.arange(0, LATENT_PADDED)
    offsets = tl.arange(0, TILE)
    is_rotary, is_latent = rotary < ROTARY, latent < LATENT
    query_row = query + token.to(tl.int64) * query_token_stride + heads[:, None] * query_head_stride
    rotated = tl.load(query_row + rotary[None, :], mask=is_head[:, None] & is_rotary[None, :], other=0.0)
    absorbed = tl.load(query_row + ROTARY + latent[None, :], mask=is_head[:, None] & is_latent[None, :], other=0.0)
    table_row = block_table + row * table_stride

    if SPLIT_TILES > 0:
        tiles_of_split = token * 0 + SPLIT_TILES
    else:
        tiles_of_split = tl.maximum((end_tile + num_splits - 1) // num_splits, 1)
    first_split = tl.program_id(2)
    end_split = first_split + 1
    if not IS_SPLIT:
        first_split = token * 0
        end_split = (end_tile + tiles_of_split - 1) // tiles_of_split
    number = token.to(tl.int64) * num_heads + heads
    is_result = is_head[:, None] & is_latent[None, :] & is_used
    total = tl.zeros([HEADS, LATENT_PADDED], tl.float32)
    total_mass = tl.zeros([HEADS], tl.float32)
    total_peak = tl.full([HEADS], float("-inf"), tl.float32)
    for split in range(first_split, end_split):
        result = tl.zeros([HEADS, LATENT_PADDED], tl.float32)
        mass = tl.zeros([HEADS], tl.float32)
        peak = tl.full([HEADS], float("-inf"), tl.float32)
        for tile in range(split * tiles_of_split, tl.minimum((split + 1) * tiles_of_split, end_tile)):
            position = tile * TILE + offsets
            visible = position < end
            block = tl.load(table_row + position // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
            cell = cache + block * block_stride + (position % BLOCK_SIZE).to(tl.int64) * position_stride
            keys = tl.load(cell[:, None] + rotary[None, :], mask=visible[:, None] & is_rotary[None, :], other=0.0)
            latents = tl.load(
                cell[:, None] + ROTARY + latent[None, :], mask=visible[:, None] & is_latent[None, :], other=0.0
            ).to(absorbed.dtype)
            products = tl.dot(absorbed, tl.trans(latents), input_precision="ieee")
            products = tl.dot(rotated, tl.trans(keys.to(rotated.dtype)), products, input_precision="ieee")
            scores = tl.where(visible[None, :], products * inner, float("-inf"))
            result, mass, peak = accumulate(scores, latents, result, mass, peak)
        part, lse = normalised(result, mass, peak, 1.0)
        if IS_SPLIT:
            place = number * num_splits + split
            tl.store(partial + place[:, None] * LATENT + latent[None, :], part, mask=is_result)
            tl.store(partial_lse + place, lse, mask=is_head & is_used)
        else:
            total, total_mass, total_peak = add_split(part, lse, total, total_mass, total_peak)
    if not IS_SPLIT:
        total = total / tl.where(total_mass > 0.0, total_mass, 1.0)[:, None]
        tl.store(output + number[:, None] * LATENT + latent[None, :], total.to(output.dtype.element_ty), mask=is_result)
