"""Triton kernels of paged attention; `penstock.kernels.triton.paged_attention` launches them."""

from __future__ import annotations

import triton
import triton.language as tl


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
def first_visible(position, WINDOW: tl.constexpr):
    """First visible position of a query; see `penstock.kernels.paged_attention.first_visible`. WINDOW is not 0."""
    if WINDOW < 0:
        return position - position % -WINDOW
    else:
        return tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def scores_of(products, inner, outer, HAS_CAP: tl.constexpr):
    """See `Scores`."""
    scores = products * inner
    if HAS_CAP:
        scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * outer
    return scores


@triton.jit
def accumulate(scores, value, output, mass, peak):
    """Accumulate a tile of online softmax: the weighted sum of values, the sum of weights and the largest score so far.

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


@triton.jit
def averages(result, mass, value_scale):
    """Averages of values, from their weighted sums and the sums of weights. value_scale: of an FP8 KV cache."""
    return result / tl.where(mass > 0.0, mass, 1.0)[:, None] * value_scale


@triton.jit
def add_sink(sink, output, mass, peak):
    """Add a score without a value to an online softmax: the weighted sum, and the sum of weights."""
    sink = sink.to(tl.float32) * 1.4426950408889634
    new_peak = tl.maximum(peak, sink)
    decay = tl.exp2(peak - new_peak)
    return output * decay[:, None], mass * decay + tl.exp2(sink - new_peak)


@triton.jit(
    do_not_specialize=["num_table_rows", "num_splits", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "seq_lens"],
)
def decode_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    sinks,
    output,
    partial,
    partial_lse,
    inner,
    outer,
    value_scale,
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
    HAS_SINKS: tl.constexpr,
):
    """Decode kernel: a split of a row's positions, for all query heads of one KV head."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens + row, mask=row < num_table_rows, other=0).to(tl.int32)
    first = seq_len * 0
    if WINDOW != 0:
        first = first_visible(tl.maximum(seq_len - 1, 0), WINDOW)
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
        if WINDOW != 0:
            visible = visible & (position >= first)
        cell = block * block_stride + (position % BLOCK_SIZE).to(tl.int64) * position_stride
        block = _blocks_of(table_row, position + TILE, stop * TILE, seq_len, BLOCK_SIZE)
        key = tl.load(keys + cell[None, :] + dims[:, None], mask=visible[None, :] & is_dim[:, None], other=0.0).to(
            queries.dtype
        )
        products = tl.dot(queries, key, input_precision="ieee")
        scores = tl.where(visible[None, :], scores_of(products, inner, outer, HAS_CAP), float("-inf"))
        value = tl.load(values + cell[:, None] + dims[None, :], mask=visible[:, None] & is_dim[None, :], other=0.0).to(
            queries.dtype
        )
        result, mass, peak = accumulate(scores, value, result, mass, peak)

    if HAS_SINKS and not IS_SPLIT:
        result, mass = add_sink(tl.load(sinks + heads, mask=group < GROUP, other=0.0), result, mass, peak)
    result = averages(result, mass, value_scale)
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
def merge_kernel(
    partial,
    partial_lse,
    sinks,
    output,
    num_splits,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
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
    sink = peak
    if HAS_SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32) * 1.4426950408889634
        peak = tl.maximum(peak, sink)
    weights = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    mass = tl.sum(weights, 0)
    if HAS_SINKS:
        mass += tl.exp2(sink - peak)
    result = tl.sum(results * weights[:, None], 0) / tl.where(mass > 0.0, mass, 1.0)
    tl.store(output + number * HEAD_SIZE + dims, result.to(output.dtype.element_ty), mask=is_dim)


@triton.jit
def request_of_tile(query_start_loc, tile, num_rows, TOKENS: tl.constexpr):
    """The last request whose first tile, query_start_loc[r] // TOKENS + r, is not beyond this one."""
    low = tile * 0
    high = tile * 0 + num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        first_tile = tl.load(query_start_loc + middle).to(tl.int32) // TOKENS + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def load_queries(
    query,
    query_start_loc,
    seq_lens,
    ends,
    num_rows,
    token_stride,
    head_stride,
    tile,
    kv_head,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    HAS_ENDS: tl.constexpr,
):
    """Queries of a tile of TOKENS tokens of one request, with all query heads of one KV head: [ROWS, HEAD_PADDED].

    Before them: the request, the position of the tile's first token, and the end of the positions that the tile sees, 0
    for one beyond the request's tokens; and of each row its position, the last one that it sees, its place in the
    output, and whether there is one. ends: `VISIBLE_ENDS`, where HAS_ENDS.
    """
    low = request_of_tile(query_start_loc, tile, num_rows, TOKENS)
    request = low.to(tl.int64)
    first_token = tl.load(query_start_loc + request).to(tl.int32)
    num_tokens = tl.load(query_start_loc + request + 1).to(tl.int32) - first_token
    num_before = tl.load(seq_lens + request).to(tl.int32) - num_tokens
    first = (tile - first_token // TOKENS - low) * TOKENS

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_PADDED)
    token = first + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < TOKENS * GROUP) & (token < num_tokens)
    token_of_step = (first_token + token).to(tl.int64)
    queries = tl.load(
        query + token_of_step[:, None] * token_stride + heads[:, None] * head_stride + dims[None, :],
        mask=is_row[:, None] & (dims < HEAD_SIZE)[None, :],
        other=0.0,
    )
    place = token_of_step * (tl.num_programs(1) * GROUP) + heads
    position = num_before + token
    last_seen = position
    stop = tl.minimum(first + TOKENS, num_tokens)
    is_used = first < num_tokens
    if HAS_ENDS:
        last_seen = tl.load(ends + token_of_step, mask=is_row, other=0).to(tl.int32) - 1
        end = tl.load(ends + first_token + stop - 1, mask=is_used, other=0).to(tl.int32)
    else:
        end = tl.where(is_used, num_before + stop, 0)
    return request, num_before + first, end, position, last_seen, place, is_row, queries


@triton.jit
def store_attention(
    output,
    sinks,
    place,
    heads,
    is_row,
    result,
    mass,
    peak,
    value_scale,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Store the attention of rows, normalised, sinks included."""
    if HAS_SINKS:
        result, mass = add_sink(tl.load(sinks + heads), result, mass, peak)
    result = averages(result, mass, value_scale)
    dims = tl.arange(0, HEAD_PADDED)
    is_result = is_row[:, None] & (dims < HEAD_SIZE)[None, :]
    tl.store(output + place[:, None] * HEAD_SIZE + dims[None, :], result.to(output.dtype.element_ty), mask=is_result)


@triton.jit
def attend_tiles(
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

    last_seen: the last position that each query sees.

    IS_MASKED: False where every query sees every position of these tiles.
    """
    dims = tl.arange(0, HEAD_PADDED)
    offsets = tl.arange(0, TILE)
    is_dim = dims < HEAD_SIZE
    for tile in range(start, stop):
        position = tile * TILE + offsets
        is_read = position < end
        if WINDOW != 0:
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
        scores = scores_of(products, inner, outer, HAS_CAP)
        if IS_MASKED:
            visible = position[None, :] <= last_seen[:, None]
            if WINDOW != 0:
                visible = visible & (position[None, :] >= first_visible(position_of_query, WINDOW)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        result, mass, peak = accumulate(scores, value, result, mass, peak)
    return result, mass, peak


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "query_start_loc", "seq_lens", "ends"],
)
def prefill_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    query_start_loc,
    seq_lens,
    ends,
    sinks,
    output,
    inner,
    outer,
    value_scale,
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
    HAS_SINKS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
):
    """A tile of TOKENS tokens of one request, with all query heads of one KV head.

    Tiles are numbered by request: the first one of request r is query_start_loc[r] // TOKENS + r. So there is room for
    all, and the number of programs follows from the shapes.
    """
    # Long prompts come last in a step, and their last tiles take longest: these begin first.
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
    table_row = block_table + request * table_stride
    keys = key_cache + kv_head.to(tl.int64) * kv_head_stride
    values = value_cache + kv_head.to(tl.int64) * kv_head_stride

    stop = (end + TILE - 1) // TILE
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    begin = program * 0
    start = program * 0
    if WINDOW != 0:
        begin = first_visible(first_position, WINDOW)
        start = tl.minimum(begin // TILE, stop)
    else:
        # Tiles that every query sees whole.
        whole = tl.where(end > 0, (first_position + 1) // TILE, 0)
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
    heads = kv_head * GROUP + tl.arange(0, ROWS) % GROUP
    store_attention(
        output, sinks, place, heads, is_row, result, mass, peak, value_scale, HEAD_SIZE, HEAD_PADDED, HAS_SINKS
    )
