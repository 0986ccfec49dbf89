"""Paged attention in Triton: split-KV decodes (Flash-Decoding), and prefills mixed with decodes (FlashAttention-2).

`penstock.kernels.paged_attention` has the specification. A cache is [num_blocks, block_size, K, D], of any strides but
the last. Softmax is computed in powers of two. Suffixes: T tokens of the step, R rows of the block table, H query
heads, K KV heads, D head size, B blocks of a request, S splits.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from penstock.device.capability import choices_of, gpu_capability
from penstock.kernels.paged_attention import NO_SCALES, CacheScales
from penstock.kernels.triton.attention_kernels import decode_kernel, merge_kernel, prefill_kernel

_LOG2_E = math.log2(math.e)
MAX_SPLITS = 32
# Programs of the decode kernel per multiprocessor that splits aim at, and the shortest split in positions.
PROGRAMS_PER_SM, _MIN_SPLIT = 4, 128
_SMS_OF_H100 = 132
# The smallest dimension of `tl.dot`.
MIN_DOT = 16


@dataclass(frozen=True, slots=True)
class Scores:
    """Scaling of the products of queries and keys, as they are stored, to scores in powers of two.

    Without a cap: products * inner. With one: tanh(products * inner / 2) * outer, where tanh takes powers of two too.
    """

    inner: float
    outer: float
    has_cap: bool

    @classmethod
    def of(cls, scale: float, soft_cap: float | None, key_scale: float = 1.0) -> Scores:
        scale *= key_scale
        if soft_cap is None:
            return cls(scale * _LOG2_E, 1.0, has_cap=False)
        return cls(2.0 * scale / soft_cap * _LOG2_E, soft_cap * _LOG2_E, has_cap=True)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Launch parameters of an attention kernel. rows: queries of a tile. positions: keys of a tile."""

    rows: int
    positions: int
    num_warps: int
    num_stages: int


def decode_attention(
    query_RHD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table_RB: Tensor,
    seq_lens_R: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: Tensor | None = None,
    *,
    scales: CacheScales = NO_SCALES,
    num_splits: int | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Attention of one query per row, the last position of each row: [R, H, D].

    A row of length 0 gives zeros, and so does one beyond the lengths. scales: of an FP8 cache. num_splits, tiling: None
    chooses them from the shapes.
    """
    num_rows, num_heads, head_size = query_RHD.shape
    output_RHD = query_RHD.new_empty(query_RHD.shape)
    if num_rows == 0:
        return output_RHD
    _, block_size, num_kv_heads, _ = key_cache.shape
    if num_splits is None:
        num_splits = choose_num_splits(num_rows, num_kv_heads, block_table_RB.shape[1] * block_size, query_RHD.device)
    partial_RHSD, lse_RHS = output_RHD, output_RHD
    if num_splits > 1:
        partial_RHSD, lse_RHS = new_partials(query_RHD, num_splits)
    if query_RHD.is_meta:
        return output_RHD
    scores = Scores.of(scale, soft_cap, scales.key)
    sinks = query_RHD if sinks_H is None else sinks_H
    tiling = tiling or _decode_tiling(head_size, query_RHD.dtype)
    group_size = num_heads // num_kv_heads
    decode_kernel[(num_rows, num_kv_heads, num_splits)](
        query_RHD,
        key_cache,
        value_cache,
        block_table_RB,
        seq_lens_R,
        sinks,
        output_RHD,
        partial_RHSD,
        lse_RHS,
        scores.inner,
        scores.outer,
        scales.value,
        min(seq_lens_R.shape[0], block_table_RB.shape[0]),
        num_splits,
        query_RHD.stride(0),
        query_RHD.stride(1),
        *key_cache.stride()[:3],
        block_table_RB.stride(0),
        GROUP=group_size,
        GROUP_PADDED=max(MIN_DOT, triton.next_power_of_2(group_size)),
        HEAD_SIZE=head_size,
        HEAD_PADDED=padded_head(head_size),
        BLOCK_SIZE=block_size,
        TILE=tiling.positions,
        IS_SPLIT=num_splits > 1,
        WINDOW=window or 0,
        HAS_CAP=scores.has_cap,
        HAS_SINKS=sinks_H is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if num_splits > 1:
        merge_splits(partial_RHSD, lse_RHS, output_RHD, sinks_H)
    return output_RHD


def new_partials(query_RHD: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    """Partial results of the splits: float32 [R, H, S, D], and log-sum-exps in powers of two [R, H, S]."""
    num_rows, num_heads, head_size = query_RHD.shape
    shape = num_rows, num_heads, num_splits
    return (
        query_RHD.new_empty((*shape, head_size), dtype=torch.float32),
        query_RHD.new_empty(shape, dtype=torch.float32),
    )


def merge_splits(partial_RHSD: Tensor, lse_RHS: Tensor, output_RHD: Tensor, sinks_H: Tensor | None) -> None:
    """Merge partial results of up to `MAX_SPLITS` splits into the output."""
    num_rows, num_heads, num_splits, head_size = partial_RHSD.shape
    merge_kernel[(num_rows, num_heads)](
        partial_RHSD,
        lse_RHS,
        output_RHD if sinks_H is None else sinks_H,
        output_RHD,
        num_splits,
        HEAD_SIZE=head_size,
        HEAD_PADDED=padded_head(head_size),
        MAX_SPLITS=MAX_SPLITS,
        HAS_SINKS=sinks_H is not None,
        num_warps=4,
    )


def choose_num_splits(num_rows: int, num_kv_heads: int, max_positions: int, device: torch.device) -> int:
    """Number of splits of every row: a power of two that gives the GPU enough programs, but no very short splits."""
    most = min(MAX_SPLITS, PROGRAMS_PER_SM * num_sms(device) // (num_rows * num_kv_heads), max_positions // _MIN_SPLIT)
    return 1 << (most.bit_length() - 1) if most > 1 else 1


@functools.cache
def num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _SMS_OF_H100
    return torch.cuda.get_device_properties(device).multi_processor_count


def prefill_attention(
    query_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table_RB: Tensor,
    query_start_loc: Tensor,
    seq_lens_R: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: Tensor | None = None,
    *,
    scales: CacheScales = NO_SCALES,
    ends_T: Tensor | None = None,
) -> Tensor:
    """Attention of any number of queries per row, which are the row's last positions: [T, H, D].

    query_start_loc: [R + 1], first token of each row. ends_T: `VISIBLE_ENDS`; None for causal
    attention. Tokens that belong to no row give zeros. scales: of an FP8 cache.
    """
    num_tokens, num_heads, head_size = query_THD.shape
    output_THD = query_THD.new_zeros(query_THD.shape)
    if num_tokens == 0 or query_THD.is_meta:
        return output_THD
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_rows = min(seq_lens_R.shape[0], block_table_RB.shape[0], query_start_loc.shape[0] - 1)
    scores = Scores.of(scale, soft_cap, scales.key)
    group_size = num_heads // num_kv_heads
    tiling = _prefill_tiling(head_size, query_THD.dtype, group_size)
    tokens_of_tile = tiling.rows // group_size
    prefill_kernel[(num_tokens // tokens_of_tile + num_rows, num_kv_heads)](
        query_THD,
        key_cache,
        value_cache,
        block_table_RB,
        query_start_loc,
        seq_lens_R,
        query_THD if ends_T is None else ends_T,
        query_THD if sinks_H is None else sinks_H,
        output_THD,
        scores.inner,
        scores.outer,
        scales.value,
        num_rows,
        query_THD.stride(0),
        query_THD.stride(1),
        *key_cache.stride()[:3],
        block_table_RB.stride(0),
        GROUP=group_size,
        ROWS=tiling.rows,
        TOKENS=tokens_of_tile,
        HEAD_SIZE=head_size,
        HEAD_PADDED=padded_head(head_size),
        BLOCK_SIZE=block_size,
        TILE=tiling.positions,
        WINDOW=window or 0,
        HAS_CAP=scores.has_cap,
        HAS_SINKS=sinks_H is not None,
        HAS_ENDS=ends_T is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return output_THD


def padded_head(head_size: int) -> int:
    return max(MIN_DOT, int(triton.next_power_of_2(head_size)))


def _decode_tiling(head_size: int, dtype: torch.dtype) -> Tiling:
    """Tiles whose accumulators stay in registers.

    For heads of 128 in 16 bits, an H200 reads keys and values at the speed of a copy with these; three stages cost up
    to a fifth (`benchmarks.gpu.attention`).
    """
    padded = padded_head(head_size)
    if dtype is torch.float32 and padded > 64:
        return Tiling(MIN_DOT, 32, num_warps=8, num_stages=2)
    if padded <= 64:
        return Tiling(MIN_DOT, 64 if dtype is torch.float32 else 128, num_warps=4, num_stages=3)
    return Tiling(MIN_DOT, 64, num_warps=4, num_stages=2)


def _prefill_tiling(head_size: int, dtype: torch.dtype, group_size: int) -> Tiling:
    """As `_decode_tiling`, with as many stages as fit into the GPU's shared memory.

    float32 has no tensor cores, so its operands take registers too.
    """
    padded = padded_head(head_size)
    if dtype is torch.float32:
        rows, positions = (64, 32) if padded <= 64 else (32, 32) if padded <= 128 else (32, 16)
        num_warps, num_stages = 8, 1
    elif padded <= 64:
        rows, positions, num_warps, num_stages = 128, 64, 4, 3
    elif padded <= 128:
        rows, positions, num_warps, num_stages = 128, 64, 8, 3
    else:
        rows, positions, num_warps, num_stages = 128, 32, 8, 2
    # A tile has at least one token with all query heads of the group.
    rows = max(rows, int(triton.next_power_of_2(group_size)))
    if dtype is not torch.float32:
        # Queries, and in each stage keys and values, are in shared memory, in 16 bits.
        shared_of_stages = (choices_of(gpu_capability()).shared_kib << 10) - 2 * rows * padded
        num_stages = max(1, min(num_stages, shared_of_stages // (4 * positions * padded)))
    return Tiling(rows, positions, num_warps, num_stages)
