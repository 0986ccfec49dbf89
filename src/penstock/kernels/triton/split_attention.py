"""Split-KV attention of several queries per row in Triton: steps that verify drafts, and batch-invariant attention.

A program attends with a tile of a request's tokens to one split of its positions; partial results are merged by their
log-sum-exps (Flash-Decoding). With a fixed split size the merge has one order, and a query's arithmetic depends on its
position alone: the number of queries beside it, of requests and of programs only decides where it is done.

Suffixes as in `penstock.kernels.triton.paged_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.paged_attention import NO_SCALES, CacheScales
from penstock.kernels.triton.attention_kernels import (
    add_sink,
    attend_tiles,
    averages,
    first_visible,
    load_queries,
    store_attention,
)
from penstock.kernels.triton.paged_attention import (
    MIN_DOT,
    PROGRAMS_PER_SM,
    Scores,
    Tiling,
    choose_num_splits,
    merge_splits,
    new_partials,
    num_sms,
    padded_head,
)

# Rows of a tile, queries times heads of a group, up to which splitting positions pays.
MOST_ROWS = 64
# Positions of a split in batch-invariant attention.
FIXED_SPLIT = 1024


def split_attention(
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
    max_query_len: int | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Attention of any number of queries per row, which are the row's last positions: [T, H, D].

    query_start_loc: [R + 1], first token of each row. ends_T: `VISIBLE_ENDS`; None for causal
    attention. Tokens that belong to no row give zeros. scales: of an
    FP8 cache. max_query_len: upper bound of a row's queries; None makes the attention batch-invariant. num_splits: None
    chooses it from the shapes; any number gives a batch-invariant attention's bits, whose splits have a fixed size.
    """
    num_tokens, num_heads, head_size = query_THD.shape
    output_THD = query_THD.new_zeros(query_THD.shape)
    if num_tokens == 0:
        return output_THD
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_rows = min(seq_lens_R.shape[0], block_table_RB.shape[0], query_start_loc.shape[0] - 1)
    group_size = num_heads // num_kv_heads
    tiling = _tiling(head_size, query_THD.dtype, group_size, max_query_len)
    tokens_of_tile = tiling.rows // group_size
    num_tiles = num_tokens // tokens_of_tile + num_rows
    max_positions = block_table_RB.shape[1] * block_size
    is_invariant = max_query_len is None
    if is_invariant:
        num_splits = num_fixed_splits(num_tiles * num_kv_heads, max_positions, query_THD.device, num_splits)
    elif num_splits is None:
        num_splits = choose_num_splits(num_rows, num_kv_heads, max_positions, query_THD.device)
    partial_THSD, lse_THS = partials_of_tokens(output_THD, num_splits)
    if query_THD.is_meta:
        return output_THD
    scores = Scores.of(scale, soft_cap, scales.key)
    _split_kernel[(num_tiles, num_kv_heads, num_splits)](
        query_THD,
        key_cache,
        value_cache,
        block_table_RB,
        query_start_loc,
        seq_lens_R,
        query_THD if ends_T is None else ends_T,
        query_THD if sinks_H is None else sinks_H,
        output_THD,
        partial_THSD,
        lse_THS,
        scores.inner,
        scores.outer,
        scales.value,
        num_rows,
        num_splits,
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
        SPLIT_TILES=FIXED_SPLIT // tiling.positions if is_invariant else 0,
        IS_SPLIT=num_splits > 1,
        WINDOW=window or 0,
        HAS_CAP=scores.has_cap,
        HAS_SINKS=sinks_H is not None,
        HAS_ENDS=ends_T is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        # Products and sums are rounded one by one, whether splits are merged at once or later.
        enable_fp_fusion=not is_invariant,
    )
    if num_splits > 1:
        merge = merge_in_order if is_invariant else merge_splits
        merge(partial_THSD, lse_THS, output_THD, sinks_H)
    return output_THD


def num_fixed_splits(num_programs: int, max_positions: int, device: torch.device, wanted: int | None) -> int:
    """Number of splits of `FIXED_SPLIT` positions, or 1: a program per query attends to all of them in turn.

    num_programs: without splits. wanted: None chooses by whether they fill the GPU.
    """
    fixed = -(-max_positions // FIXED_SPLIT)
    if wanted is None:
        return fixed if num_programs <= PROGRAMS_PER_SM * num_sms(device) else 1
    return fixed if wanted > 1 else 1


def partials_of_tokens(output_THD: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    """Partial results as of `new_partials`, empty for tokens that belong to no row; the output itself for one split."""
    if num_splits == 1:
        return output_THD, output_THD
    partial_THSD, lse_THS = new_partials(output_THD, num_splits)
    return partial_THSD, lse_THS.fill_(float("-inf"))


def merge_in_order(partial_THSD: Tensor, lse_THS: Tensor, output_THD: Tensor, sinks_H: Tensor | None) -> None:
    """Merge partial results one after the other, each operation rounded by itself."""
    num_tokens, num_heads, num_splits, head_size = partial_THSD.shape
    merge_in_order_kernel[(num_tokens, num_heads)](
        partial_THSD,
        lse_THS,
        output_THD if sinks_H is None else sinks_H,
        output_THD,
        num_splits,
        HEAD_SIZE=head_size,
        HEAD_PADDED=padded_head(head_size),
        HAS_SINKS=sinks_H is not None,
        enable_fp_fusion=False,
        num_warps=4,
    )


def _tiling(head_size: int, dtype: torch.dtype, group_size: int, max_query_len: int | None) -> Tiling:
    """Tiles whose accumulators stay in registers; those of batch-invariant attention depend on the layer alone."""
    padded, least = padded_head(head_size), max(MIN_DOT, int(triton.next_power_of_2(group_size)))
    rows = MOST_ROWS if max_query_len is None else int(triton.next_power_of_2(max_query_len * group_size))
    if dtype is torch.float32:
        most, positions, num_warps, num_stages = 32, 32 if padded <= 128 else 16, 8, 1
    elif padded <= 128:
        most, positions, num_warps, num_stages = MOST_ROWS, 64, 4, 2
    else:
        most, positions, num_warps, num_stages = MOST_ROWS, 32, 8, 2
    return Tiling(max(least, min(rows, most)), positions, num_warps, num_stages)


@triton.jit
def normalised(result, mass, peak, value_scale):
    """Attention of one split, and its log-sum-exp in powers of two: -inf where it has no positions."""
    return averages(result, mass, value_scale), peak + tl.log2(tl.where(mass > 0.0, mass, 1.0))


@triton.jit
def add_split(part, lse, total, mass, peak):
    """Add a split to those before it: the weighted sum, the sum of weights and the largest log-sum-exp."""
    new_peak = tl.maximum(peak, lse)
    origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay = tl.exp2(peak - origin)
    weight = tl.exp2(lse - origin)
    return total * decay[:, None] + part * weight[:, None], mass * decay + weight, new_peak


@triton.jit(
    do_not_specialize=["num_rows", "num_splits", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "query_start_loc", "seq_lens", "ends"],
)
def _split_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    query_start_loc,
    seq_lens,
    ends,
    sinks,
    output,
    partial,
    partial_lse,
    inner,
    outer,
    value_scale,
    num_rows,
    num_splits,
    query_token_stride,
    query_head_stride,
    block_stride,
    position_stride,
    kv_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
):
    """TOKENS tokens of one request, with all query heads of one KV head, and one split of the positions, or all.

    Tiles of tokens are numbered as in `prefill_kernel`. SPLIT_TILES: tiles of positions of each split, from position 0
    on; 0 divides the visible ones equally.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request, first_position, end, position_of_query, last_seen, place, is_row, queries = load_queries(
        query,
        query_start_loc,
        seq_lens,
        ends,
        num_rows,
        query_token_stride,
        query_head_stride,
        program,
        kv_head,
        GROUP,
        ROWS,
        TOKENS,
        HEAD_SIZE,
        HEAD_PADDED,
        HAS_ENDS,
    )
    dims = tl.arange(0, HEAD_PADDED)
    table_row = block_table + request * table_stride
    keys = key_cache + kv_head.to(tl.int64) * kv_head_stride
    values = value_cache + kv_head.to(tl.int64) * kv_head_stride

    begin = program * 0
    if WINDOW != 0:
        begin = first_visible(first_position, WINDOW)
    first_tile = begin // TILE
    end_tile = (end + TILE - 1) // TILE
    if SPLIT_TILES > 0:
        origin = program * 0
        tiles_of_split = program * 0 + SPLIT_TILES
    else:
        origin = first_tile
        tiles_of_split = tl.maximum((end_tile - first_tile + num_splits - 1) // num_splits, 1)
    first_split = tl.program_id(2)
    end_split = first_split + 1
    if not IS_SPLIT:
        first_split = (first_tile - origin) // tiles_of_split
        end_split = (end_tile - origin + tiles_of_split - 1) // tiles_of_split

    total = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    total_mass = tl.zeros([ROWS], tl.float32)
    total_peak = tl.full([ROWS], float("-inf"), tl.float32)
    for split in range(first_split, end_split):
        start = origin + split * tiles_of_split
        stop = tl.minimum(start + tiles_of_split, end_tile)
        start = tl.maximum(start, first_tile)
        result, mass, peak = attend_tiles(
            queries,
            position_of_query,
            last_seen,
            keys,
            values,
            table_row,
            block_stride,
            position_stride,
            start,
            stop,
            begin,
            end,
            inner,
            outer,
            tl.zeros([ROWS, HEAD_PADDED], tl.float32),
            tl.zeros([ROWS], tl.float32),
            tl.full([ROWS], float("-inf"), tl.float32),
            HEAD_SIZE,
            HEAD_PADDED,
            BLOCK_SIZE,
            TILE,
            WINDOW,
            HAS_CAP,
            True,
        )
        part, lse = normalised(result, mass, peak, value_scale)
        if IS_SPLIT:
            number = place * num_splits + split
            is_part = is_row[:, None] & (dims < HEAD_SIZE)[None, :]
            tl.store(partial + number[:, None] * HEAD_SIZE + dims[None, :], part, mask=is_part)
            tl.store(partial_lse + number, lse, mask=is_row)
        else:
            total, total_mass, total_peak = add_split(part, lse, total, total_mass, total_peak)

    if not IS_SPLIT:
        heads = kv_head * GROUP + tl.arange(0, ROWS) % GROUP
        store_attention(
            output, sinks, place, heads, is_row, total, total_mass, total_peak, 1.0, HEAD_SIZE, HEAD_PADDED, HAS_SINKS
        )


@triton.jit(do_not_specialize=["num_splits"])
def merge_in_order_kernel(
    partial,
    partial_lse,
    sinks,
    output,
    num_splits,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the splits of one token and query head, one after the other, as `_split_kernel` does without splits."""
    number = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    one = tl.arange(0, 1)
    dims = tl.arange(0, HEAD_PADDED)
    is_dim = (dims < HEAD_SIZE)[None, :]
    total = tl.zeros([1, HEAD_PADDED], tl.float32)
    mass = tl.zeros([1], tl.float32)
    peak = tl.full([1], float("-inf"), tl.float32)
    for split in range(num_splits):
        part = number * num_splits + split + one
        lse = tl.load(partial_lse + part)
        is_part = is_dim & (lse > float("-inf"))[:, None]
        result = tl.load(partial + part[:, None] * HEAD_SIZE + dims[None, :], mask=is_part, other=0.0)
        total, mass, peak = add_split(result, lse, total, mass, peak)
    if HAS_SINKS:
        total, mass = add_sink(tl.load(sinks + tl.program_id(1) + one), total, mass, peak)
    total = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
    tl.store(
        output + number * HEAD_SIZE + one[:, None] * HEAD_SIZE + dims[None, :],
        total.to(output.dtype.element_ty),
        mask=is_dim,
    )
