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
import triton.language as tl
from torch import Tensor

_LOG2_E = math.log2(math.e)
MAX_SPLITS = 32
# Programs of the decode kernel per multiprocessor that splits aim at, and the shortest split in positions.
_PROGRAMS_PER_SM, _MIN_SPLIT = 4, 128
_SMS_OF_H100 = 132
# The smallest dimension of `tl.dot`.
_MIN_DOT = 16


@dataclass(frozen=True, slots=True)
class Scores:
    """From the products of queries and keys to scores, in powers of two.

    Without a cap: products * inner. With one: tanh(products * inner / 2) * outer, where tanh takes powers of two too.
    """

    inner: float
    outer: float
    has_cap: bool

    @classmethod
    def of(cls, scale: float, soft_cap: float | None) -> Scores:
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
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    num_splits: int | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Attention of one query per row, the last position of each row: [R, H, D].

    A row of length 0 gives zeros, and so does one beyond the lengths. num_splits, tiling: None chooses them from the
    shapes.
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
    scores = Scores.of(scale, soft_cap)
    tiling = tiling or _decode_tiling(head_size, query_RHD.dtype)
    group_size = num_heads // num_kv_heads
    _decode_kernel[(num_rows, num_kv_heads, num_splits)](
        query_RHD,
        key_cache,
        value_cache,
        block_table_RB,
        seq_lens_R,
        output_RHD,
        partial_RHSD,
        lse_RHS,
        scores.inner,
        scores.outer,
        min(seq_lens_R.shape[0], block_table_RB.shape[0]),
        num_splits,
        query_RHD.stride(0),
        query_RHD.stride(1),
        *key_cache.stride()[:3],
        block_table_RB.stride(0),
        GROUP=group_size,
        GROUP_PADDED=max(_MIN_DOT, triton.next_power_of_2(group_size)),
        HEAD_SIZE=head_size,
        HEAD_PADDED=_padded_head(head_size),
        BLOCK_SIZE=block_size,
        TILE=tiling.positions,
        IS_SPLIT=num_splits > 1,
        WINDOW=sliding_window or 0,
        HAS_CAP=scores.has_cap,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if num_splits > 1:
        _merge_kernel[(num_rows, num_heads)](
            partial_RHSD,
            lse_RHS,
            output_RHD,
            num_splits,
            HEAD_SIZE=head_size,
            HEAD_PADDED=_padded_head(head_size),
            MAX_SPLITS=MAX_SPLITS,
            num_warps=4,
        )
    return output_RHD


def new_partials(query_RHD: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    """Partial results of the splits: float32 [R, H, S, D], and log-sum-exps in powers of two [R, H, S]."""
    num_rows, num_heads, head_size = query_RHD.shape
    shape = num_rows, num_heads, num_splits
    return (
        query_RHD.new_empty((*shape, head_size), dtype=torch.float32),
        query_RHD.new_empty(shape, dtype=torch.float32),
    )


def choose_num_splits(num_rows: int, num_kv_heads: int, max_positions: int, device: torch.device) -> int:
    """Number of splits of every row: a power of two that gives the GPU enough programs, but no very short splits."""
    most = min(
        MAX_SPLITS, _PROGRAMS_PER_SM * _num_sms(device) // (num_rows * num_kv_heads), max_positions // _MIN_SPLIT
    )
    return 1 << (most.bit_length() - 1) if most > 1 else 1


@functools.cache
def _num_sms(device: torch.device) -> int:
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
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Causal attention of any number of queries per row, which are the row's last positions: [T, H, D].

    query_start_loc: [R + 1], first token of each row. Tokens that belong to no row give zeros.
    """
    num_tokens, num_heads, head_size = query_THD.shape
    output_THD = query_THD.new_zeros(query_THD.shape)
    if num_tokens == 0 or query_THD.is_meta:
        return output_THD
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_rows = min(seq_lens_R.shape[0], block_table_RB.shape[0], query_start_loc.shape[0] - 1)
    scores = Scores.of(scale, soft_cap)
    group_size = num_heads // num_kv_heads
    tiling = _prefill_tiling(head_size, query_THD.dtype, group_size)
    tokens_of_tile = tiling.rows // group_size
    _prefill_kernel[(num_tokens // tokens_of_tile + num_rows, num_kv_heads)](
        query_THD,
        key_cache,
        value_cache,
        block_table_RB,
        query_start_loc,
        seq_lens_R,
        output_THD,
        scores.inner,
        scores.outer,
        num_rows,
        query_THD.stride(0),
        query_THD.stride(1),
        *key_cache.stride()[:3],
        block_table_RB.stride(0),
        GROUP=group_size,
        ROWS=tiling.rows,
        TOKENS=tokens_of_tile,
        HEAD_SIZE=head_size,
        HEAD_PADDED=_padded_head(head_size),
        BLOCK_SIZE=block_size,
        TILE=tiling.positions,
        WINDOW=sliding_window or 0,
        HAS_CAP=scores.has_cap,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return output_THD


def _padded_head(head_size: int) -> int:
    return max(_MIN_DOT, int(triton.next_power_of_2(head_size)))


def _decode_tiling(head_size: int, dtype: torch.dtype) -> Tiling:
    """Tiles whose accumulators stay in registers.

    For heads of 128 in 16 bits, an H200 reads keys and values at the speed of a copy with these; three stages cost up
    to a fifth (`benchmarks.gpu.attention`).
    """
    padded = _padded_head(head_size)
    if dtype is torch.float32 and padded > 64:
        return Tiling(_MIN_DOT, 32, num_warps=8, num_stages=2)
    if padded <= 64:
        return Tiling(_MIN_DOT, 64 if dtype is torch.float32 else 128, num_warps=4, num_stages=3)
    return Tiling(_MIN_DOT, 64, num_warps=4, num_stages=2)


def _prefill_tiling(head_size: int, dtype: torch.dtype, group_size: int) -> Tiling:
    """As `_decode_tiling`; float32 has no tensor cores, so its operands take registers too."""
    padded = _padded_head(head_size)
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
    return Tiling(max(rows, int(triton.next_power_of_2(group_size))), positions, num_warps, num_stages)


@triton.jit
def _cache_offsets(block_table_row, position, is_read, block_stride, position_stride, BLOCK_SIZE: tl.constexpr):
    """Offsets of these positions of a row in the cache, int64; of block 0 where they are not read."""
    block = tl.load(block_table_row + position // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
    return block * block_stride + (position % BLOCK_SIZE).to(tl.int64) * position_stride


@triton.jit
def _blocks_of(block_table_row, position, end, seq_len, BLOCK_SIZE: tl.constexpr):
    """Blocks of these positions of a row, int64; block 0 from `end` on."""
    is_read = (position < end) & (position < seq_len)
    return tl.load(block_table_row + position // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)


@triton.jit
def _scores(products, inner, outer, HAS_CAP: tl.constexpr):
    """See `Scores`."""
    scores = products * inner
    if HAS_CAP:
        scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * outer
    return scores


@triton.jit
def _accumulate(scores, value, output, mass, peak):
    """One tile of online softmax: the weighted sum of values, the sum of weights and the largest score so far.

    A row that has seen no position has a peak of -inf.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - origin[:, None])
    decay = tl.exp2(peak - origin)
    mass = mass * decay + tl.sum(weights, 1)
    output = output * decay[:, None]
    output = tl.dot(weights.to(value.dtype), value, output, input_precision="ieee")
    return output, mass, new_peak


@triton.jit(
    do_not_specialize=["num_table_rows", "num_splits", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "seq_lens"],
)
def _decode_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    output,
    partial,
    partial_lse,
    inner,
    outer,
    num_table_rows,
    num_splits,
    query_token_stride,
    query_head_stride,
    block_stride,
    position_stride,
    kv_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """One split of a row's positions, for all query heads of one KV head."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens + row, mask=row < num_table_rows, other=0).to(tl.int32)
    first = seq_len * 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)
    # The row's tiles, divided among the splits.
    first_tile = first // TILE
    end_tile = (seq_len + TILE - 1) // TILE
    tiles_of_split = (end_tile - first_tile + num_splits - 1) // num_splits
    start = first_tile + split * tiles_of_split
    stop = tl.minimum(start + tiles_of_split, end_tile)

    group = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, HEAD_PADDED)
    offsets = tl.arange(0, TILE)
    heads = kv_head * GROUP + group
    is_dim = dims < HEAD_SIZE
    is_query = (group < GROUP)[:, None] & is_dim[None, :]
    queries = tl.load(
        query + row * query_token_stride + heads[:, None] * query_head_stride + dims[None, :], mask=is_query, other=0.0
    )
    table_row = block_table + row * table_stride
    keys = key_cache + kv_head.to(tl.int64) * kv_head_stride
    values = value_cache + kv_head.to(tl.int64) * kv_head_stride

    peak = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    mass = tl.zeros([GROUP_PADDED], tl.float32)
    result = tl.zeros([GROUP_PADDED, HEAD_PADDED], tl.float32)
    # Blocks are looked up a tile ahead, so that loads of keys and values do not wait for them.
    block = _blocks_of(table_row, start * TILE + offsets, stop * TILE, seq_len, BLOCK_SIZE)
    for tile in range(start, stop):
        position = tile * TILE + offsets
        visible = position < seq_len
        if WINDOW > 0:
            visible = visible & (position >= first)
        cell = block * block_stride + (position % BLOCK_SIZE).to(tl.int64) * position_stride
        block = _blocks_of(table_row, position + TILE, stop * TILE, seq_len, BLOCK_SIZE)
        key = tl.load(keys + cell[None, :] + dims[:, None], mask=visible[None, :] & is_dim[:, None], other=0.0).to(
            queries.dtype
        )
        products = tl.dot(queries, key, input_precision="ieee")
        scores = tl.where(visible[None, :], _scores(products, inner, outer, HAS_CAP), float("-inf"))
        value = tl.load(values + cell[:, None] + dims[None, :], mask=visible[:, None] & is_dim[None, :], other=0.0).to(
            queries.dtype
        )
        result, mass, peak = _accumulate(scores, value, result, mass, peak)

    result = result / tl.where(mass > 0.0, mass, 1.0)[:, None]
    # Rows of queries and partial results are numbered alike.
    number = row * (tl.num_programs(1) * GROUP) + heads
    if not IS_SPLIT:
        tl.store(
            output + number[:, None] * HEAD_SIZE + dims[None, :], result.to(output.dtype.element_ty), mask=is_query
        )
    else:
        part = number * num_splits + split
        has_positions = start < stop
        tl.store(partial + part[:, None] * HEAD_SIZE + dims[None, :], result, mask=is_query & has_positions)
        # -inf where the split has no positions: its partial result is not used.
        tl.store(partial_lse + part, peak + tl.log2(tl.where(mass > 0.0, mass, 1.0)), mask=group < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    partial,
    partial_lse,
    output,
    num_splits,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Merge the splits of one row and query head by their log-sum-exps."""
    number = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, MAX_SPLITS)
    part = number * num_splits + split
    dims = tl.arange(0, HEAD_PADDED)
    is_dim = dims < HEAD_SIZE
    is_split = split < num_splits
    lse = tl.load(partial_lse + part, mask=is_split, other=float("-inf"))
    # Loaded without waiting for the log-sum-exps; what a split without positions did not write is dropped.
    is_result = is_split[:, None] & is_dim[None, :]
    results = tl.load(partial + part[:, None] * HEAD_SIZE + dims[None, :], mask=is_result, other=0.0)
    results = tl.where((lse > float("-inf"))[:, None], results, 0.0)
    peak = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    mass = tl.sum(weights, 0)
    result = tl.sum(results * weights[:, None], 0) / tl.where(mass > 0.0, mass, 1.0)
    tl.store(output + number * HEAD_SIZE + dims, result.to(output.dtype.element_ty), mask=is_dim)


@triton.jit
def _attend_tiles(
    queries,
    position_of_query,
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
    result,
    mass,
    peak,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Tiles start .. stop of a row's positions. begin .. end: positions that some query sees; no other is read.

    IS_MASKED: False where every query sees every position of these tiles.
    """
    dims = tl.arange(0, HEAD_PADDED)
    offsets = tl.arange(0, TILE)
    is_dim = dims < HEAD_SIZE
    for tile in range(start, stop):
        position = tile * TILE + offsets
        is_read = position < end
        if WINDOW > 0:
            is_read = is_read & (position >= begin)
        cell = _cache_offsets(table_row, position, is_read, block_stride, position_stride, BLOCK_SIZE)
        key_place = keys + cell[None, :] + dims[:, None]
        value_place = values + cell[:, None] + dims[None, :]
        if IS_MASKED or HEAD_SIZE != HEAD_PADDED:
            key = tl.load(key_place, mask=is_read[None, :] & is_dim[:, None], other=0.0).to(queries.dtype)
            value = tl.load(value_place, mask=is_read[:, None] & is_dim[None, :], other=0.0).to(queries.dtype)
        else:
            key = tl.load(key_place).to(queries.dtype)
            value = tl.load(value_place).to(queries.dtype)
        products = tl.dot(queries, key, input_precision="ieee")
        scores = _scores(products, inner, outer, HAS_CAP)
        if IS_MASKED:
            visible = position[None, :] <= position_of_query[:, None]
            if WINDOW > 0:
                visible = visible & (position[None, :] > position_of_query[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        result, mass, peak = _accumulate(scores, value, result, mass, peak)
    return result, mass, peak


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "query_start_loc", "seq_lens"],
)
def _prefill_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    query_start_loc,
    seq_lens,
    output,
    inner,
    outer,
    num_rows,
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
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """A tile of TOKENS tokens of one request, with all query heads of one KV head.

    Tiles are numbered by request: the first one of request r is query_start_loc[r] // TOKENS + r. So there is room for
    all, and the number of programs follows from the shapes.
    """
    # Long prompts come last in a step, and their last tiles take longest: these begin first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    # The last request whose first tile is not beyond this one.
    low = program * 0
    high = program * 0 + num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        first_tile = tl.load(query_start_loc + middle).to(tl.int32) // TOKENS + middle
        if first_tile <= program:
            low = middle
        else:
            high = middle - 1
    request = low.to(tl.int64)
    first_token = tl.load(query_start_loc + request).to(tl.int32)
    num_tokens = tl.load(query_start_loc + request + 1).to(tl.int32) - first_token
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    first = (program - first_token // TOKENS - low) * TOKENS  # of the tile, within the request's tokens
    num_before = seq_len - num_tokens

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_PADDED)
    token = first + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < TOKENS * GROUP) & (token < num_tokens)
    is_query = is_row[:, None] & (dims < HEAD_SIZE)[None, :]
    token_of_step = (first_token + token).to(tl.int64)
    queries = tl.load(
        query + token_of_step[:, None] * query_token_stride + heads[:, None] * query_head_stride + dims[None, :],
        mask=is_query,
        other=0.0,
    )
    position_of_query = num_before + token
    table_row = block_table + request * table_stride
    keys = key_cache + kv_head.to(tl.int64) * kv_head_stride
    values = value_cache + kv_head.to(tl.int64) * kv_head_stride

    # Positions that some query sees; none for a program beyond the request's tokens.
    is_used = first < num_tokens
    end = tl.where(is_used, num_before + tl.minimum(first + TOKENS, num_tokens), 0)
    stop = (end + TILE - 1) // TILE
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    begin = program * 0
    start = program * 0
    if WINDOW > 0:
        begin = tl.maximum(num_before + first - WINDOW + 1, 0)
        start = tl.minimum(begin // TILE, stop)
    else:
        # Tiles that every query sees whole.
        whole = tl.where(is_used, (num_before + first + 1) // TILE, 0)
        result, mass, peak = _attend_tiles(
            queries,
            position_of_query,
            keys,
            values,
            table_row,
            block_stride,
            position_stride,
            start,
            whole,
            begin,
            end,
            inner,
            outer,
            result,
            mass,
            peak,
            HEAD_SIZE,
            HEAD_PADDED,
            BLOCK_SIZE,
            TILE,
            WINDOW,
            HAS_CAP,
            False,
        )
        start = whole
    result, mass, peak = _attend_tiles(
        queries,
        position_of_query,
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
        result,
        mass,
        peak,
        HEAD_SIZE,
        HEAD_PADDED,
        BLOCK_SIZE,
        TILE,
        WINDOW,
        HAS_CAP,
        True,
    )
    result = result / tl.where(mass > 0.0, mass, 1.0)[:, None]
    number = token_of_step * (tl.num_programs(1) * GROUP) + heads
    tl.store(output + number[:, None] * HEAD_SIZE + dims[None, :], result.to(output.dtype.element_ty), mask=is_query)
