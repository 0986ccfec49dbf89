// Causal attention over the paged cache, with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), and
// long contexts split among threads (split-KV, as in Flash-Decoding: Dao, Haziza, Massa and Sizov 2023).
//
// An item is one KV head and a few queries; its rows are the query heads of that KV head (GQA group). The queries
// belong to one request, or to several with a common block prefix, whose shared blocks are then read once. A work unit
// is an item, or the items of a few KV heads, over the whole context or one split of it. Positions are taken in chunks
// and tiles aligned to fixed multiples. Each chunk is accumulated by itself and merged in order of position, on any
// thread: a row's result is bit-exact for any prefill chunking and any batch.
//
// Positions index the KV cache of this rank; whole-request positions are named so (see `kept`).

namespace PENSTOCK_NAMESPACE {

// Work below which waking other threads costs more than it saves: KV elements times query rows.
constexpr int64_t kAloneAttention = 16 * 1024;

struct AttentionJob {
  const AttentionArgs* args;
  const AttentionPlan* plan;
  int64_t next_unit;  // units not taken yet; threads count it down
  bool has_failed;    // scratch allocation failed on a thread
};

// Queries of one request in an item.
struct Part {
  int64_t request, first_token, num_tokens;
  int64_t whole_position;  // of the first token, in the whole request
  int64_t begin, end;      // cache positions on this rank, of the first token up to the last one that a token sees
  int64_t first_row;     // in the item
  int64_t shared_tiles;  // leading tiles with the same blocks as the previous part
};

// Query rows of one KV head, or of a few, and the range of visible positions that one thread processes. Rows are
// grouped by KV head, in order.
struct Unit {
  const Work* work;
  int64_t split;               // index of the split, for a split item
  int64_t kv_head, num_heads;  // first KV head, and their number
  int64_t num_parts, rows;     // rows: per KV head
  int64_t begin;               // first position visible to any query
  int64_t from, to;            // range of positions to process; `from` is in the first chunk
  Part parts[kQueryRows];
};

// Rows of an item with the same blocks in a tile, and the tile to prefetch meanwhile.
struct Run {
  const int32_t* blocks;  // a block table valid for all rows
  int64_t first_row, rows;
  int64_t kv_head, begin;
  const int32_t* next;  // blocks of the next tile
  int64_t num_next, next_kv_head;
};

// Buffers of one thread.
struct AttentionBuffers {
  float* query;         // [rows][head_size], scaled; quantised to int16 for an int8 cache, rounded for bfloat16 products
  float* query_scale;   // [rows], quantisation scales of the query
  float* slope;         // [rows], of ALiBi
  int32_t* head;        // [rows], query head
  int32_t* seen_from;   // [rows], first visible position
  int32_t* seen_to;     // [rows], end of the visible positions
  float* scores;        // [rows][tile]; softmax weights as the query
  float* weight_scale;  // [rows], quantisation scales of the weights
  float* keep;          // [rows], padded to whole vectors: rescale factor of the accumulators when the peak rises
  float* key_scale;     // [tile]
  float* value_scale;   // [tile]
  Sums total, chunk;
  float* packed;  // of `PackedPart`, in bfloat16 arithmetic
};

// Floats of a row's accumulators.
PENSTOCK_INLINE int64_t sums_size(int64_t size) { return size + kLanes + 1; }

PENSTOCK_INLINE Sums sums_at(float* memory, int64_t rows, int64_t size) {
  return {memory, memory + rows * size, memory + rows * (size + kLanes)};
}

PENSTOCK_INLINE Sums rows_from(const Sums& sums, int64_t row, int64_t size) {
  return {sums.values + row * size, sums.mass + row * kLanes, sums.peak + row};
}

PENSTOCK_INLINE void clear(const Sums& sums, int64_t rows, int64_t size) {
  for (int64_t row = 0; row < rows; ++row) sums.peak[row] = kMinusInfinity;
  std::memset(sums.mass, 0, rows * kLanes * sizeof(float));
  std::memset(sums.values, 0, rows * size * sizeof(float));
}

// Merges the accumulators of a later chunk.
static __attribute__((noinline)) void merge(const Sums& total, const Sums& chunk, int64_t rows, int64_t size) {
  for (int64_t row = 0; row < rows; ++row) {
    const Vec mass = load(chunk.mass + row * kLanes);
    if (sum_lanes(mass) == 0.0f) continue;
    const float before = total.peak[row], now = chunk.peak[row], peak = now > before ? now : before;
    const float keep = exp2_of_negative(splat(before - peak))[0], take = exp2_of_negative(splat(now - peak))[0];
    total.peak[row] = peak;
    store(total.mass + row * kLanes, load(total.mass + row * kLanes) * keep + mass * take);
    float* to = total.values + row * size;
    const float* from = chunk.values + row * size;
    for (int64_t d = 0; d < size; ++d) to[d] = to[d] * keep + from[d] * take;
  }
}

// Floats of one head's output.
PENSTOCK_INLINE int64_t out_size(const AttentionArgs& a) { return value_size(a) + (a.num_shares > 1 ? 1 : 0); }

// Prefetch distance of queries in tokens: their stride is too large for the hardware prefetcher.
constexpr int64_t kTokensAhead = 8;

// Loads the queries of a unit, and prefetches their output rows.
template <class T>
PENSTOCK_INLINE void load_queries(const AttentionArgs& a, const Unit& unit, const AttentionBuffers& buffers) {
  const int64_t group = a.num_heads / a.num_kv_heads, size_in_bytes = a.head_size * static_cast<int64_t>(sizeof(float));
  for (int64_t h = 0; h < unit.num_heads; ++h)
    for (int64_t p = 0; p < unit.num_parts; ++p) {
      const Part& part = unit.parts[p];
      for (int64_t i = 0; i < part.num_tokens * group; ++i) {
        const int64_t token = part.first_token + i / group, head = (unit.kv_head + h) * group + i % group;
        const int64_t row = h * unit.rows + part.first_row + i, whole_position = part.whole_position + i / group;
        float* query = buffers.query + row * a.head_size;
        const float* from = a.query + token * a.query_stride + head * a.head_size;
        if (i / group + kTokensAhead < part.num_tokens) fetch_soon<false>(from + kTokensAhead * a.query_stride, size_in_bytes);
        fetch_soon<true>(a.out + token * a.out_stride + head * out_size(a), size_in_bytes);
        prepare_head(a, from, head % own_heads(a), token, a.scale * kLog2e, query);
        if (kIsInt8<T>) buffers.query_scale[row] = narrow(query, a.head_size, largest_of(a.head_size));
        if (kIsPaired<T>) round_in_place(query, a.head_size);
        buffers.head[row] = static_cast<int32_t>(head);
        buffers.slope[row] = a.slopes == nullptr ? 0.0f : a.slopes[head] * kLog2e;
        buffers.seen_from[row] = static_cast<int32_t>(seen_from(a, whole_position));
        buffers.seen_to[row] = static_cast<int32_t>(kept(a, visible_end(a, token, whole_position)));
      }
    }
}

// Adds the weight of a sink to a row's mass, and returns the factor on the row's weighted sum.
PENSTOCK_INLINE float add_sink(float sink, float peak, float& mass) {
  const float top = sink > peak ? sink : peak, keep = exp2_of_negative(splat(peak - top))[0];
  mass = mass * keep + exp2_of_negative(splat(sink - top))[0];
  return keep;
}

PENSTOCK_INLINE void write_output(const AttentionArgs& a, const Unit& unit, const Sums& sums) {
  const int64_t group = a.num_heads / a.num_kv_heads, size = value_size(a);
  for (int64_t h = 0; h < unit.num_heads; ++h)
    for (int64_t p = 0; p < unit.num_parts; ++p) {
      const Part& part = unit.parts[p];
      for (int64_t i = 0; i < part.num_tokens * group; ++i) {
        const int64_t token = part.first_token + i / group, head = (unit.kv_head + h) * group + i % group;
        const int64_t row = h * unit.rows + part.first_row + i;
        float mass = sum_lanes(load(sums.mass + row * kLanes)), keep = 1.0f;
      if (a.sinks != nullptr) keep = add_sink(a.sinks[head] * kLog2e, sums.peak[row], mass);
        const float scale = a.num_shares > 1 && mass == 0.0f ? 0.0f : keep / mass;
        const float* from = sums.values + row * size;
        float* to = a.out + token * a.out_stride + head * out_size(a);
        for (int64_t d = 0; d < size; ++d) to[d] = from[d] * scale;
        if (a.num_shares > 1) to[size] = sums.peak[row] + __builtin_log2f(mass);
      }
    }
}

PENSTOCK_INLINE void copy_scales(const AttentionArgs& a, int8_t* block, int64_t from, int64_t to, float* scales) {
  std::memcpy(scales, scales_of(a, block) + from * sizeof(float), (to - from) * sizeof(float));
}
template <class T>
PENSTOCK_INLINE void copy_scales(const AttentionArgs&, T*, int64_t, int64_t, float*) {}

// Rows of one register tile.
PENSTOCK_INLINE int64_t rows_at_once(int64_t rows, int64_t row) {
  const int64_t most = rows <= 2 * kFewRows ? kFewRows : kManyRows;
  return rows - row < most ? rows - row : most;
}

// Visible positions of a row in the tile start .. stop.
PENSTOCK_INLINE Visible visible_to(const AttentionBuffers& buffers, int64_t row, int64_t start, int64_t stop) {
  const int64_t seen_from = buffers.seen_from[row], seen_to = buffers.seen_to[row];
  const int64_t from = seen_from > start ? seen_from - start : 0;
  const int64_t to = (seen_to < stop ? seen_to : stop) - start;
  return from < to ? Visible{from, to} : Visible{0, 0};
}

// Scores of a run's rows with a tile's positions start .. stop. Returns the tile's values: segments, of which the last
// one is empty and begins at `stop`.
template <class T>
static void score_tile(const AttentionArgs& a, const Cut& cut, const AttentionBuffers& buffers, const Run& run,
                       int64_t start, int64_t stop, Segment<T>* segments) {
  const int64_t size = a.head_size, block_size = a.block_size, stride = cut.stride();
  const int64_t seen = start > run.begin ? start : run.begin;
  const int64_t first_block = seen / block_size, end_block = (stop + block_size - 1) / block_size;
  const int32_t* seen_to = buffers.seen_to + run.first_row;
  const float* query = buffers.query + run.first_row * size;

  // Positions outside seen .. stop are not read: they may belong to another request and hold NaN.
  int num_segments = 0;
  const int most_blocks = blocks_at_once<T>(run.rows, block_size);
  for (int64_t block = first_block; block < end_block;) {
    KeyBlock<T> now[kMostBlocks];
    int count = 0;
    const int64_t first = block;
    for (; count < most_blocks && block < end_block; ++count, ++block) {
      const bool has_next = block - first_block < run.num_next;
      const int64_t later = has_next ? run.next[block - first_block] : run.blocks[block];
      const int64_t later_head = has_next ? run.next_kv_head : run.kv_head;
      T* keys = block_at<T>(a, a.key_cache, run.blocks[block], run.kv_head);
      T* values = block_at<T>(a, a.value_cache, run.blocks[block], run.kv_head);
      T* later_keys = block_at<T>(a, a.key_cache, later, later_head);
      T* later_values = block_at<T>(a, a.value_cache, later, later_head);
      now[count] = {keys, later_keys, buffers.scores + block * block_size - start};
      const int64_t from = block * block_size > seen ? block * block_size : seen;
      const int64_t to = (block + 1) * block_size < stop ? (block + 1) * block_size : stop;
      const int64_t before = kIsInt8<T> ? from % block_size % 2 : 0;  // the position interleaved with the first one
      const int64_t skipped = from % block_size - before;
      segments[num_segments++] = {values + skipped * size, later_values + skipped * size, from - before - start,
                                  to - from + before, (block_size - skipped) / 2 * 2};
      copy_scales(a, keys, from % block_size, from % block_size + to - from, buffers.key_scale + from - start);
      copy_scales(a, values, from % block_size, from % block_size + to - from, buffers.value_scale + from - start);
    }
    int64_t row = 0;
    while (row < run.rows && seen_to[row] <= first * block_size) ++row;  // rows that see none of these blocks
    while (row < run.rows) {
      const int64_t rows = rows_at_once(run.rows, row);
      KeyBlock<T> at[kMostBlocks];
      for (int b = 0; b < count; ++b) at[b] = {now[b].keys, now[b].next, now[b].scores + row * stride};
      score_blocks(rows, query + row * size, buffers.query_scale + run.first_row + row, at, count, block_size, size,
                   stride);
      row += rows;
    }
  }
  segments[num_segments] = {nullptr, nullptr, stop, 0, 0};
}

// The first row that sees a position from `position` on; rows after it may see none.
PENSTOCK_INLINE int64_t first_row_seeing(const AttentionBuffers& buffers, const Run& run, int64_t position) {
  int64_t row = 0;
  while (row < run.rows && buffers.seen_to[run.first_row + row] <= position) ++row;
  return row;
}

// Packs the tile part by part, and computes scores in bfloat16 arithmetic.
template <class W>
static void score_tile(const AttentionArgs& a, const Cut& cut, const AttentionBuffers& buffers, const Run& run,
                       int64_t start, int64_t stop, Segment<Paired<W>>*) {
  const int64_t stride = cut.stride(), seen = start > run.begin ? start : run.begin, first_block = seen / a.block_size;
  const PackedPart packed(buffers.packed, a, cut);
  W* const keys = reinterpret_cast<W*>(packed.keys);
  for (int64_t block = first_block; block * a.block_size < stop;) {
    const int64_t from = block * a.block_size / cut.part * cut.part, to = least(from + cut.part, stop);
    for (; block * a.block_size < to; ++block) {
      const bool has_next = block - first_block < run.num_next;
      const Paired<W>* const here = block_at<Paired<W>>(a, a.key_cache, run.blocks[block], run.kv_head);
      const Paired<W>* const next =
          has_next ? block_at<Paired<W>>(a, a.key_cache, run.next[block - first_block], run.next_kv_head) : here;
      pack_keys(a, here, next, block * a.block_size - from, keys);
    }
    const int64_t row = first_row_seeing(buffers, run, from);
    if (row < run.rows)
      multiply_packed(buffers.query + (run.first_row + row) * a.head_size, a.head_size, run.rows - row,
                      pairs_of(a.head_size), keys, to - from, buffers.scores + row * stride + from - start, stride);
  }
}

// Adds a tile's values, weighed by the softmax weights in `scores`, to the sums.
template <class T>
static void weigh_tile(const AttentionArgs& a, const Cut& cut, const AttentionBuffers& buffers, const Sums& sums,
                       const Run& run, int64_t start, int64_t stop, const Segment<T>* segments) {
  const int64_t stride = cut.stride();
  const int32_t* seen_to = buffers.seen_to + run.first_row;
  for (int64_t row = 0; row < run.rows;) {
    const int64_t rows = rows_at_once(run.rows, row);
    int64_t limit = 0;
    for (int64_t i = row; i < row + rows; ++i) limit = seen_to[i] > limit ? seen_to[i] : limit;
    limit = limit < stop ? limit - start : stop - start;
    weigh_rows(rows, buffers.scores + row * stride, stride, buffers.weight_scale + row, segments, limit, value_size(a),
               a.head_size, buffers.keep + row, sums.values + (run.first_row + row) * value_size(a));
    row += rows;
  }
}

template <class W>
static void weigh_tile(const AttentionArgs& a, const Cut& cut, const AttentionBuffers& buffers, const Sums& sums,
                       const Run& run, int64_t start, int64_t stop, const Segment<Paired<W>>*) {
  const int64_t size = value_size(a), columns = whole_panels(size), stride = cut.stride();
  const int64_t seen = start > run.begin ? start : run.begin, first_block = seen / a.block_size;
  const PackedPart packed(buffers.packed, a, cut);
  W* const packed_values = reinterpret_cast<W*>(packed.values);
  ValueRows<W> values(a, run.blocks + first_block, run.kv_head, run.next, run.num_next, run.next_kv_head, seen);
  const float* keep = buffers.keep;
  for (int64_t from = seen / cut.part * cut.part; from < stop; from += cut.part) {
    const int64_t to = least(from + cut.part, stop), first = keep != nullptr ? 0 : first_row_seeing(buffers, run, from);
    pack_values(a, values, from, seen, to, packed_values);
    // Rows of pairs are half as long as those of the scores that they replace.
    const float* const weights = buffers.scores + first * stride + (from - start) / 2;
    multiply_packed(weights, stride, run.rows - first, pairs_of(to - from), packed_values, size, packed.products, columns);
    add_products(packed.products, columns, keep, run.rows - first, size, sums.values + (run.first_row + first) * size);
    keep = nullptr;
  }
}

// One tile of a run: positions start .. stop.
template <class T>
static void attend_tile(const AttentionArgs& a, const Cut& cut, const AttentionBuffers& buffers, const Sums& sums,
                        const Run& run, int64_t start, int64_t stop) {
  const int64_t stride = cut.stride();
  Segment<T> segments[kTilePositions + 1];
  score_tile(a, cut, buffers, run, start, stop, segments);

  // Each softmax phase covers all rows, so that the latencies of rows overlap.
  for (int64_t row = 0; row < run.rows; ++row) {
    const float old_peak = sums.peak[run.first_row + row];
    const float slope = buffers.slope[run.first_row + row];
    const float* biases =
        a.biases == nullptr ? nullptr : a.biases + buffers.head[run.first_row + row] * a.num_biases;
    const int64_t distance = buffers.seen_to[run.first_row + row] - 1 - start;  // from the tile's first position
    const float peak = find_peak(a.soft_cap * kLog2e, buffers.scores + row * stride,
                                 visible_to(buffers, run.first_row + row, start, stop),
                                 kIsInt8<T> ? buffers.key_scale : nullptr, slope, distance, biases, a.num_biases);
    buffers.keep[row] = peak > old_peak ? old_peak - peak : 0.0f;
    if (peak > old_peak) sums.peak[run.first_row + row] = peak;
  }
  for (int64_t row = 0; row < run.rows; row += kLanes)
    store(buffers.keep + row, exp2_of_negative(load(buffers.keep + row)));
  const int64_t length = kIsPaired<T> ? 2 * pairs_of(stop - start) : (stop - start + kLanes - 1) / kLanes * kLanes;
  const float largest_weight = kIsInt8<T> ? largest_of(cut.tile) : 0.0f;
  for (int64_t row = 0; row < run.rows; ++row) {
    float* mass = sums.mass + (run.first_row + row) * kLanes;
    float* weights = buffers.scores + row * stride;
    const Visible visible = visible_to(buffers, run.first_row + row, start, stop);
    const float peak = sums.peak[run.first_row + row];
    const Vec kept_mass = load(mass) * buffers.keep[row];
    if constexpr (kIsPaired<T>)
      store(mass, soften_to_pairs(weights, visible, length, peak, kept_mass));
    else
      store(mass, soften(weights, visible, length, peak, kIsInt8<T> ? buffers.value_scale : nullptr, kept_mass));
    if (kIsInt8<T>) buffers.weight_scale[row] = narrow_weights(weights, visible, stride, largest_weight);
  }
  weigh_tile(a, cut, buffers, sums, run, start, stop, segments);
}

// Sets the next tile of a run: KV head `kv_head` of a part, from position `start` on.
PENSTOCK_INLINE void set_next(const AttentionArgs& a, const Cut& cut, const Unit& unit, const Part& part,
                              int64_t start, int64_t kv_head, Run& run) {
  const int64_t first = (start > unit.begin ? start : unit.begin) / a.block_size;
  const int64_t left = (part.end + a.block_size - 1) / a.block_size - first;
  const int64_t end_of_tile = (start + cut.tile) / a.block_size - first;
  run.next = table_of(a, part.request) + first;
  run.num_next = left < end_of_tile ? left : end_of_tile;
  run.next_kv_head = kv_head;
}

// Finds the tile after part `done`: another part's, the next tile's, or the next unit's.
PENSTOCK_INLINE void find_next(const AttentionArgs& a, const Cut& cut, const Unit& unit, const Unit* next_unit,
                               int64_t start, int64_t done, Run& run) {
  for (; start < unit.to; start += cut.tile, done = -1)
    for (int64_t p = done + 1; p < unit.num_parts; ++p)
      if (unit.parts[p].end > start) return set_next(a, cut, unit, unit.parts[p], start, unit.kv_head, run);
  run.num_next = 0;
  if (next_unit != nullptr)
    set_next(a, cut, *next_unit, next_unit->parts[0], next_unit->from / cut.tile * cut.tile, next_unit->kv_head, run);
}

// Accumulates one chunk of a unit's item.
template <class T>
static void attend_chunk(const AttentionArgs& a, const Cut& cut, const AttentionBuffers& buffers, const Sums& sums,
                         const Unit& unit, const Unit* next_unit, int64_t chunk) {
  clear(sums, unit.num_heads * unit.rows, value_size(a));
  const int64_t first = chunk * cut.chunk, begin = first > unit.from ? first : unit.from;
  const int64_t end = first + cut.chunk < unit.to ? first + cut.chunk : unit.to;
  const int64_t group = a.num_heads / a.num_kv_heads;
  if (begin >= end) return;  // no position of the chunk is on this rank
  for (int64_t start = begin / cut.tile * cut.tile; start < end; start += cut.tile) {
    for (int64_t p = 0; p < unit.num_parts;) {
      int64_t last = p, stop = unit.parts[p].end;
      while (last + 1 < unit.num_parts && unit.parts[last + 1].shared_tiles > start / cut.tile) {
        ++last;
        stop = unit.parts[last].end > stop ? unit.parts[last].end : stop;
      }
      if (stop > start) {
        Run run;
        run.blocks = table_of(a, unit.parts[p].request);
        run.first_row = unit.parts[p].first_row;
        run.rows = unit.parts[last].first_row + unit.parts[last].num_tokens * group - run.first_row;
        run.begin = unit.begin;
        for (int64_t h = 0; h < unit.num_heads; ++h, run.first_row += unit.rows) {
          run.kv_head = unit.kv_head + h;
          if (h + 1 < unit.num_heads)
            set_next(a, cut, unit, unit.parts[p], start, run.kv_head + 1, run);
          else
            find_next(a, cut, unit, next_unit, start, last, run);
          attend_tile<T>(a, cut, buffers, sums, run, start, start + cut.tile < stop ? start + cut.tile : stop);
        }
      }
      p = last + 1;
    }
  }
}

// Writes the step's keys and values of the parts within this unit, unless write_all has written them.
template <class T>
PENSTOCK_INLINE void write_parts(const AttentionArgs& a, const Unit& unit, float* key) {
  for (int64_t p = 0; p < unit.num_parts; ++p) {
    const Part& part = unit.parts[p];
    const int64_t from = part.begin > unit.from ? part.begin : unit.from;
    const int64_t to = part.end < unit.to ? part.end : unit.to;
    for (int64_t h = 0; h < unit.num_heads; ++h) write_positions<T>(a, part.request, unit.kv_head + h, from, to, key);
  }
}

// A whole item.
template <class T>
static void attend(const AttentionArgs& a, const Cut& cut, const AttentionBuffers& buffers, const Unit& unit,
                   const Unit* next_unit) {
  const int64_t first = unit.from / cut.chunk, last = (unit.to - 1) / cut.chunk;
  attend_chunk<T>(a, cut, buffers, buffers.total, unit, next_unit, first);
  for (int64_t chunk = first + 1; chunk <= last; ++chunk) {
    attend_chunk<T>(a, cut, buffers, buffers.chunk, unit, next_unit, chunk);
    merge(buffers.total, buffers.chunk, unit.num_heads * unit.rows, value_size(a));
  }
  write_output(a, unit, buffers.total);
}

// One chunk of a split item; the thread that finishes the last chunk merges all of them.
template <class T>
static void attend_split(const AttentionArgs& a, const Cut& cut, const AttentionBuffers& buffers, const Unit& unit,
                         const Unit* next_unit) {
  const int64_t size = value_size(a), rows = unit.num_heads * unit.rows, stride = rows * sums_size(size);
  const Work& work = *unit.work;
  const int64_t heads = unit.kv_head / unit.num_heads;
  float* partial = work.partial + heads * work.num_splits * stride;
  const Sums sums = sums_at(partial + unit.split * stride, rows, size);
  attend_chunk<T>(a, cut, buffers, sums, unit, next_unit, unit.from / cut.chunk);
  if (__atomic_sub_fetch(work.left + heads, 1, __ATOMIC_ACQ_REL) != 0) return;
  const Sums total = sums_at(partial, rows, size);
  for (int64_t other = 1; other < work.num_splits; ++other)
    merge(total, sums_at(partial + other * stride, rows, size), rows, size);
  write_output(a, unit, total);
}

// Writes all keys and values of the step, shared among the threads.
template <class T>
static void write_all(const AttentionArgs& a, int thread, int num_threads, float* key) {
  const int64_t num_tokens = a.query_start[a.num_requests];
  const int64_t begin = num_tokens * thread / num_threads, end = num_tokens * (thread + 1) / num_threads;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t first_token = a.query_start[r + 1] - a.seq_lens[r];
    const int64_t from = a.query_start[r] > begin ? a.query_start[r] : begin;
    const int64_t to = a.query_start[r + 1] < end ? a.query_start[r + 1] : end;
    const int64_t last = kept(a, to - first_token);
    int64_t position = kept(a, from - first_token), stop;
    // Block by block: the KV heads of a block are contiguous, as are those of a token.
    for (; position < last; position = stop) {
      stop = least((position / a.block_size + 1) * a.block_size, last);
      for (int64_t head = 0; head < a.num_kv_heads; ++head) write_positions<T>(a, r, head, position, stop, key);
    }
  }
}

// Takes the next unit; false when none is left. Units go from last to first: requests are sorted by rising number of
// tokens, and the longest should start first.
static bool take_unit(AttentionJob& job, Unit& unit) {
  const AttentionArgs& a = *job.args;
  const AttentionPlan& plan = *job.plan;
  const int64_t number = __atomic_sub_fetch(&job.next_unit, 1, __ATOMIC_RELAXED);
  if (number < 0) return false;
  int64_t low = 0, high = plan.num_work;  // first_unit of low <= number < first_unit of high
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (plan.work[middle].first_unit <= number ? low : high) = middle;
  }
  const Work& work = plan.work[low];
  // Items of the same KV heads are adjacent, so that their keys and values are still in the core's private cache.
  const int64_t units_of_heads = work.items_per_head * work.num_splits;
  const int64_t within = (number - work.first_unit) % units_of_heads;
  unit.work = &work;
  unit.kv_head = (number - work.first_unit) / units_of_heads * work.num_heads;
  unit.num_heads = work.num_heads;
  unit.split = work.num_splits > 1 ? within : 0;
  unit.num_parts = work.num_members;
  unit.rows = 0;
  unit.begin = INT64_MAX;
  unit.to = 0;
  const int64_t first_query = work.num_splits > 1 ? 0 : within * plan.tokens_per_item;
  for (int64_t p = 0; p < work.num_members; ++p) {
    const Member& member = plan.members[work.first_member + p];
    const int64_t request = member.request, left = tokens_of(a, request) - first_query;
    const int64_t queries = left < plan.tokens_per_item ? left : plan.tokens_per_item;
    Part& part = unit.parts[p];
    part.request = request;
    part.first_token = a.query_start[request] + first_query;
    part.num_tokens = queries;
    part.whole_position = a.seq_lens[request] - left;
    part.begin = kept(a, part.whole_position);
    part.end = kept(a, visible_end(a, part.first_token + queries - 1, part.whole_position + queries - 1));
    part.first_row = unit.rows;
    part.shared_tiles = member.shared_tiles;
    unit.rows += queries * (a.num_heads / a.num_kv_heads);
    const int64_t begin = seen_from(a, part.whole_position);
    unit.begin = begin < unit.begin ? begin : unit.begin;
    unit.to = part.end > unit.to ? part.end : unit.to;
  }
  unit.from = unit.begin;
  if (work.num_splits > 1) {
    const int64_t first = (unit.begin / plan.cut.chunk + unit.split) * plan.cut.chunk, end = first + plan.cut.chunk;
    unit.from = first > unit.begin ? first : unit.begin;
    unit.to = end < unit.to ? end : unit.to;
  }
  return true;
}

template <class T>
static void attention_thread(void* data, int thread, const Team& team) {
  auto& job = *static_cast<AttentionJob*>(data);
  const AttentionArgs& a = *job.args;
  const AttentionPlan& plan = *job.plan;
  const int64_t rows = plan.tokens_per_item * (a.num_heads / a.num_kv_heads), size = a.head_size;
  const int64_t sums = sums_size(value_size(a));
  const int64_t stride = plan.cut.stride();
  static thread_local Scratch scratch;
  // The scores' buffer also holds one key head while it is written.
  const int64_t scores = rows * stride > size ? rows * stride : size;
  const int64_t keep = (rows + kLanes - 1) / kLanes * kLanes;
  const int64_t packed = kIsPaired<T> ? PackedPart::floats(a, plan.cut, rows) : 0;
  float* memory =
      scratch.get(static_cast<size_t>(packed + rows * (size + 6 + 2 * sums) + scores + 2 * stride + keep));
  if (memory == nullptr) __atomic_store_n(&job.has_failed, true, __ATOMIC_RELAXED);
  AttentionBuffers b;
  b.packed = memory;
  b.scores = b.packed + packed;
  b.keep = b.scores + scores;
  b.key_scale = b.keep + keep;
  b.value_scale = b.key_scale + stride;
  b.query = b.value_scale + stride;
  b.total = sums_at(b.query + rows * size, rows, value_size(a));
  b.chunk = sums_at(b.query + rows * (size + sums), rows, value_size(a));
  b.query_scale = b.query + rows * (size + 2 * sums);
  b.weight_scale = b.query_scale + rows;
  b.seen_from = reinterpret_cast<int32_t*>(b.weight_scale + rows);
  b.seen_to = b.seen_from + rows;
  b.slope = reinterpret_cast<float*>(b.seen_to + rows);
  b.head = reinterpret_cast<int32_t*>(b.slope + rows);
  if (plan.writes_first) {
    if (memory != nullptr) write_all<T>(a, thread, team.num_threads, b.scores);
    team.barrier();
  }
  if (memory == nullptr) return;
  // With many units, each thread takes its next unit early, to prefetch it towards the end of the current one.
  const bool looks_ahead = plan.work[plan.num_work].first_unit >= 8 * team.num_threads;
  Unit units[2];
  bool has_unit = take_unit(job, units[0]);
  for (int now = 0; has_unit; now ^= 1) {
    const Unit& unit = units[now];
    bool has_next = looks_ahead && take_unit(job, units[now ^ 1]);
    const Unit* next = has_next ? &units[now ^ 1] : nullptr;
    load_queries<T>(a, unit, b);
    if (!plan.writes_first && a.phase == AttentionPhase::kBoth) write_parts<T>(a, unit, b.scores);
    if (unit.work->num_splits > 1)
      attend_split<T>(a, plan.cut, b, unit, next);
    else
      attend<T>(a, plan.cut, b, unit, next);
    has_unit = has_next || (!looks_ahead && take_unit(job, units[now ^ 1]));
  }
}

// Divides the step into work units, in memory of the calling thread. False when allocation fails.
static bool make_plan(const AttentionArgs& a, AttentionPlan& plan) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  plan.cut = Cut(a.block_size, a.cache_type);
  plan.few_tokens = group < kQueryRows ? kQueryRows / group : 1;
  plan.num_threads = a.num_threads;
  int64_t num_elements = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t tokens = tokens_of(a, r);
    // A request of few tokens writes its keys just before it reads them, unless other requests may read them too.
    const bool may_be_read = tokens > (a.num_requests > 1 ? 1 : plan.few_tokens);
    plan.writes_first |= may_be_read && a.phase == AttentionPhase::kBoth;
    num_elements += (kept(a, a.seq_lens[r]) - begin_of(a, r)) * tokens * a.num_heads * a.head_size;
  }
  if (num_elements < kAloneAttention) plan.num_threads = 1;

  static thread_local Scratch plan_scratch, partial_scratch;
  const int64_t member_floats = a.num_requests * static_cast<int64_t>(sizeof(Member) / sizeof(float));
  const int64_t work_floats = (a.num_requests + 1) * static_cast<int64_t>(sizeof(Work) / sizeof(float));
  float* memory = plan_scratch.get(static_cast<size_t>(member_floats + work_floats + slots_for(a.num_requests)));
  if (memory == nullptr) return false;
  plan.members = reinterpret_cast<Member*>(memory);
  plan.work = reinterpret_cast<Work*>(memory + member_floats);
  order_members(a, plan, reinterpret_cast<int32_t*>(memory + member_floats + work_floats));
  gather_work(a, plan);

  int64_t num_partials = 0;
  for (int64_t w = 0; w < plan.num_work; ++w)
    if (plan.work[w].num_splits > 1)
      num_partials += a.num_kv_heads * (1 + plan.work[w].num_splits * plan.work[w].rows * sums_size(value_size(a)));
  float* partial = partial_scratch.get(static_cast<size_t>(num_partials));
  if (partial == nullptr && num_partials > 0) return false;
  for (int64_t w = 0; w < plan.num_work; ++w) {
    Work& work = plan.work[w];
    if (work.num_splits == 1) continue;
    work.left = reinterpret_cast<int32_t*>(partial);
    for (int64_t head = 0; head < a.num_kv_heads; ++head) work.left[head] = static_cast<int32_t>(work.num_splits);
    work.partial = partial + a.num_kv_heads;
    partial = work.partial + a.num_kv_heads * work.num_splits * work.rows * sums_size(value_size(a));
  }
  return true;
}

// Attention over a cache of elements T.
template <class T>
static bool attention_over(const AttentionArgs& a, T*) {
  AttentionPlan plan{};
  if (!make_plan(a, plan)) return false;
  AttentionJob job{&a, &plan, plan.work[plan.num_work].first_unit, false};
  run_parallel(plan.num_threads, attention_thread<T>, &job);
  return !job.has_failed;
}

}  // namespace PENSTOCK_NAMESPACE
