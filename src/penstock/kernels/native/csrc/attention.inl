// Causal attention over the paged cache, with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), and long
// contexts shared among the threads (split-KV, as in Flash-Decoding: Dao, Haziza, Massa and Sizov 2023).
//
// The unit of work is one KV head of one request and a few of its queries, whose rows are the query heads that share
// the KV head, over all of the context or a part of it. Positions are taken in chunks and tiles that begin at fixed
// multiples. Each chunk is summed up by itself and then merged into those before it, whoever computed it: a row's result
// has the same bits however its request was cut into steps, and whatever else runs.

namespace PENSTOCK_NAMESPACE {

constexpr int64_t kQueryRows = 24;
constexpr int64_t kTilePositions = 64;
constexpr int64_t kChunkPositions = 1024;
// Work below which waking other threads costs more than it saves: elements of keys and values times rows.
constexpr int64_t kAloneAttention = 16 * 1024;

// How the positions are cut: a tile is a number of whole blocks, a chunk a number of whole tiles.
struct Cut {
  int64_t tile, chunk;
  explicit Cut(int64_t block_size) {
    tile = block_size >= kTilePositions ? block_size : kTilePositions / block_size * block_size;
    chunk = tile >= kChunkPositions ? tile : kChunkPositions / tile * tile;
  }
  // Floats from one row of a tile's scores to the next.
  int64_t stride() const { return (tile + kLanes - 1) / kLanes * kLanes; }
};

// One request's share of a job. A request of few tokens has one item per KV head, which may be split into its chunks.
struct RequestWork {
  int64_t first_unit;
  int64_t num_splits;  // units of an item; 1 for a whole item at once
  float* partial;      // [kv heads][num_splits][rows * sums_size], if it is split
  int32_t* left;       // [kv heads], splits that are not done
};

struct AttentionJob {
  const AttentionArgs* args;
  const RequestWork* requests;  // [requests + 1]
  Cut cut;
  int64_t tokens_per_item;
  bool writes_first;  // all keys and values are written before anything is read
  int64_t next_unit;  // counted down by the threads
  bool has_failed;    // a thread found no memory to work in
};

// Some queries of one KV head of one request.
struct Item {
  int64_t request, kv_head, first_token, rows;
  int64_t first_position, end;  // of the queries
  int64_t begin;                // first position that any of them sees
};

// Buffers of one thread.
struct AttentionBuffers {
  float* query;   // [rows][head_size], scaled
  float* scores;  // [rows][tile]
  float* key_scale;
  float* value_scale;
  Sums total, chunk;
};

// Floats that a row's sums take.
PENSTOCK_INLINE int64_t sums_size(int64_t size) { return size + kLanes + 1; }

PENSTOCK_INLINE Sums sums_at(float* memory, int64_t rows, int64_t size) {
  return {memory, memory + rows * size, memory + rows * (size + kLanes)};
}

PENSTOCK_INLINE void clear(const Sums& sums, int64_t rows, int64_t size) {
  for (int64_t row = 0; row < rows; ++row) sums.peak[row] = kMinusInfinity;
  std::memset(sums.mass, 0, rows * kLanes * sizeof(float));
  std::memset(sums.values, 0, rows * size * sizeof(float));
}

// Adds what a later chunk has summed up.
static __attribute__((noinline)) void merge(const Sums& total, const Sums& chunk, int64_t rows, int64_t size) {
  for (int64_t row = 0; row < rows; ++row) {
    const Vec mass = load(chunk.mass + row * kLanes);
    if (sum_lanes(mass) == 0.0f) continue;
    const float before = total.peak[row], now = chunk.peak[row], peak = now > before ? now : before;
    const float keep = exp(splat(before - peak))[0], take = exp(splat(now - peak))[0];
    total.peak[row] = peak;
    store(total.mass + row * kLanes, load(total.mass + row * kLanes) * keep + mass * take);
    float* to = total.values + row * size;
    const float* from = chunk.values + row * size;
    for (int64_t d = 0; d < size; ++d) to[d] = to[d] * keep + from[d] * take;
  }
}

PENSTOCK_INLINE void load_queries(const AttentionArgs& a, const Item& item, float* query) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  for (int64_t row = 0; row < item.rows; ++row) {
    const int64_t token = item.first_token + row / group, head = item.kv_head * group + row % group;
    prepare_head(a, a.query + token * a.query_stride + head * a.head_size, head, token, a.scale,
                 query + row * a.head_size);
  }
}

PENSTOCK_INLINE void write_output(const AttentionArgs& a, const Item& item, const Sums& sums) {
  const int64_t group = a.num_heads / a.num_kv_heads, size = a.head_size;
  for (int64_t row = 0; row < item.rows; ++row) {
    const int64_t token = item.first_token + row / group, head = item.kv_head * group + row % group;
    const float scale = 1.0f / sum_lanes(load(sums.mass + row * kLanes));
    const float* from = sums.values + row * size;
    float* to = a.out + token * a.out_stride + head * size;
    for (int64_t d = 0; d < size; ++d) to[d] = from[d] * scale;
  }
}

PENSTOCK_INLINE void copy_scales(const AttentionArgs& a, int8_t* block, int64_t from, int64_t to, float* scales) {
  std::memcpy(scales, scales_of(a, block) + from * sizeof(float), (to - from) * sizeof(float));
}
template <class T>
PENSTOCK_INLINE void copy_scales(const AttentionArgs&, T*, int64_t, int64_t, float*) {}

// One tile of an item: positions start .. stop.
template <class T>
static void attend_tile(const AttentionArgs& a, const Cut& cut, const AttentionBuffers& buffers, const Sums& sums,
                        const Item& item, int64_t start, int64_t stop) {
  const int64_t size = a.head_size, block_size = a.block_size, stride = cut.stride();
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int32_t* blocks = a.block_table + item.request * a.block_table_stride;
  const int64_t seen = start > item.begin ? start : item.begin;
  const int64_t first_block = seen / block_size, end_block = (stop + block_size - 1) / block_size;
  const int64_t last_block = (item.end - 1) / block_size, blocks_per_tile = cut.tile / block_size;
  const bool has_scales = sizeof(T) == 1;

  // Positions outside seen .. stop are not read: what lies there is not this request's, and may not be a number.
  Segment<T> segments[kTilePositions + 1];
  int num_segments = 0;
  const int pair = item.rows <= 3 ? 2 : 1;
  for (int64_t block = first_block; block < end_block;) {
    KeyBlock<T> now[2];
    int count = 0;
    const int64_t first = block;
    for (; count < pair && block < end_block; ++count, ++block) {
      const int64_t later = block + blocks_per_tile <= last_block ? blocks[block + blocks_per_tile] : blocks[block];
      T* keys = block_at<T>(a, a.key_cache, blocks[block], item.kv_head);
      T* values = block_at<T>(a, a.value_cache, blocks[block], item.kv_head);
      now[count] = {keys, block_at<T>(a, a.key_cache, later, item.kv_head),
                    buffers.scores + block * block_size - start};
      const int64_t from = block * block_size > seen ? block * block_size : seen;
      const int64_t to = (block + 1) * block_size < stop ? (block + 1) * block_size : stop;
      const int64_t skipped = from % block_size * size;
      segments[num_segments++] = {values + skipped, block_at<T>(a, a.value_cache, later, item.kv_head) + skipped,
                                  from - start, to - from};
      copy_scales(a, keys, from % block_size, from % block_size + to - from, buffers.key_scale + from - start);
      copy_scales(a, values, from % block_size, from % block_size + to - from, buffers.value_scale + from - start);
    }
    // Rows before the block see none of it.
    int64_t row = first * block_size > item.first_position ? (first * block_size - item.first_position) * group : 0;
    while (row < item.rows) {
      const int64_t left = item.rows - row;
      const int64_t rows = item.rows <= 2 * kFewRows ? (left < kFewRows ? left : kFewRows)
                                                     : (left < kManyRows ? left : kManyRows);
      KeyBlock<T> at[2] = {now[0], now[1]};
      for (int b = 0; b < count; ++b) at[b].scores += row * stride;
      score_blocks(rows, buffers.query + row * size, at, count, block_size, size, stride);
      row += rows;
    }
  }
  segments[num_segments] = {nullptr, nullptr, stop, 0};

  const int64_t length = (stop - start + kLanes - 1) / kLanes * kLanes;
  for (int64_t row = 0; row < item.rows; ++row) {
    const int64_t position = item.first_position + row / group;
    const int64_t seen_from = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
    const int64_t from = seen_from > start ? seen_from - start : 0;
    const int64_t to = position + 1 < stop ? position + 1 - start : stop - start;
    float* scores = buffers.scores + row * stride;
    if (from >= to)  // nothing of this tile is visible
      std::memset(scores, 0, length * sizeof(float));
    else
      soften(a.soft_cap, scores, from, to, length, has_scales ? buffers.key_scale : nullptr,
             has_scales ? buffers.value_scale : nullptr, sums, row, size);
  }

  for (int64_t row = 0; row < item.rows;) {
    const int64_t left = item.rows - row;
    const int64_t rows = item.rows <= 2 * kFewRows ? (left < kFewRows ? left : kFewRows)
                                                   : (left < kManyRows ? left : kManyRows);
    const int64_t position = item.first_position + (row + rows - 1) / group;
    const int64_t limit = position + 1 < stop ? position + 1 - start : stop - start;
    weigh_rows(rows, buffers.scores + row * stride, stride, segments, limit, size, sums.values + row * size);
    row += rows;
  }
}

// What an item sees of one chunk, summed up.
template <class T>
static void attend_chunk(const AttentionArgs& a, const Cut& cut, const AttentionBuffers& buffers, const Sums& sums,
                         const Item& item, int64_t chunk) {
  clear(sums, item.rows, a.head_size);
  const int64_t first = chunk * cut.chunk, begin = first > item.begin ? first : item.begin;
  const int64_t end = first + cut.chunk < item.end ? first + cut.chunk : item.end;
  for (int64_t start = begin / cut.tile * cut.tile; start < end; start += cut.tile)
    attend_tile<T>(a, cut, buffers, sums, item, start, start + cut.tile < end ? start + cut.tile : end);
}

PENSTOCK_INLINE Item item_at(const AttentionArgs& a, int64_t request, int64_t kv_head, int64_t first_query,
                             int64_t most) {
  const int64_t query_len = a.query_start[request + 1] - a.query_start[request];
  const int64_t queries = query_len - first_query < most ? query_len - first_query : most;
  Item item;
  item.request = request;
  item.kv_head = kv_head;
  item.first_token = a.query_start[request] + first_query;
  item.rows = queries * (a.num_heads / a.num_kv_heads);
  item.first_position = a.seq_lens[request] - query_len + first_query;
  item.end = item.first_position + queries;
  item.begin = a.window > 0 && item.first_position >= a.window ? item.first_position - a.window + 1 : 0;
  return item;
}

// A whole item.
template <class T>
static void attend(const AttentionJob& job, const AttentionBuffers& buffers, const Item& item) {
  const AttentionArgs& a = *job.args;
  load_queries(a, item, buffers.query);
  if (!job.writes_first)
    write_positions<T>(a, item.request, item.kv_head, item.first_position, item.end, buffers.scores);
  const int64_t first = item.begin / job.cut.chunk, last = (item.end - 1) / job.cut.chunk;
  attend_chunk<T>(a, job.cut, buffers, buffers.total, item, first);
  for (int64_t chunk = first + 1; chunk <= last; ++chunk) {
    attend_chunk<T>(a, job.cut, buffers, buffers.chunk, item, chunk);
    merge(buffers.total, buffers.chunk, item.rows, a.head_size);
  }
  write_output(a, item, buffers.total);
}

// One chunk of an item that is split; who does the last one merges them all.
template <class T>
static void attend_split(const AttentionJob& job, const RequestWork& work, const AttentionBuffers& buffers,
                         const Item& item, int64_t split) {
  const AttentionArgs& a = *job.args;
  const int64_t chunk = item.begin / job.cut.chunk + split, size = a.head_size;
  load_queries(a, item, buffers.query);
  if (!job.writes_first) {
    const int64_t first = chunk * job.cut.chunk, end = first + job.cut.chunk;
    write_positions<T>(a, item.request, item.kv_head, first > item.first_position ? first : item.first_position,
                       end < item.end ? end : item.end, buffers.scores);
  }
  const int64_t stride = item.rows * sums_size(size);
  float* partial = work.partial + item.kv_head * work.num_splits * stride;
  attend_chunk<T>(a, job.cut, buffers, sums_at(partial + split * stride, item.rows, size), item, chunk);
  if (__atomic_sub_fetch(work.left + item.kv_head, 1, __ATOMIC_ACQ_REL) != 0) return;
  const Sums total = sums_at(partial, item.rows, size);
  for (int64_t other = 1; other < work.num_splits; ++other)
    merge(total, sums_at(partial + other * stride, item.rows, size), item.rows, size);
  write_output(a, item, total);
}

// All keys and values of the step, shared among the threads.
template <class T>
static void write_all(const AttentionArgs& a, int thread, int num_threads, float* key) {
  const int64_t num_tokens = a.query_start[a.num_requests];
  const int64_t begin = num_tokens * thread / num_threads, end = num_tokens * (thread + 1) / num_threads;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t first_token = a.query_start[r + 1] - a.seq_lens[r];
    const int64_t from = a.query_start[r] > begin ? a.query_start[r] : begin;
    const int64_t to = a.query_start[r + 1] < end ? a.query_start[r + 1] : end;
    for (int64_t head = 0; from < to && head < a.num_kv_heads; ++head)
      write_positions<T>(a, r, head, from - first_token, to - first_token, key);
  }
}

template <class T>
static void attention_thread(void* data, int thread, const Team& team) {
  auto& job = *static_cast<AttentionJob*>(data);
  const AttentionArgs& a = *job.args;
  const int64_t group = a.num_heads / a.num_kv_heads, rows = job.tokens_per_item * group, size = a.head_size;
  const int64_t stride = job.cut.stride();
  static thread_local Scratch scratch;
  // The scores' memory holds one key head too, while it is written.
  const int64_t scores = rows * stride > size ? rows * stride : size;
  float* memory = scratch.get(static_cast<size_t>(rows * (size + 2 * sums_size(size)) + scores + 2 * stride));
  if (memory == nullptr) __atomic_store_n(&job.has_failed, true, __ATOMIC_RELAXED);
  AttentionBuffers b;
  b.scores = memory;
  b.key_scale = b.scores + scores;
  b.value_scale = b.key_scale + stride;
  b.query = b.value_scale + stride;
  b.total = sums_at(b.query + rows * size, rows, size);
  b.chunk = sums_at(b.query + rows * (size + sums_size(size)), rows, size);
  if (job.writes_first) {
    if (memory != nullptr) write_all<T>(a, thread, team.num_threads, b.scores);
    team.barrier();
  }
  if (memory == nullptr) return;
  // From the last unit to the first: requests come by rising number of tokens, and the longest should begin first.
  for (;;) {
    const int64_t unit = __atomic_sub_fetch(&job.next_unit, 1, __ATOMIC_RELAXED);
    if (unit < 0) return;
    int64_t low = 0, high = a.num_requests;  // first_unit of low <= unit < first_unit of high
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (job.requests[middle].first_unit <= unit ? low : high) = middle;
    }
    const RequestWork& work = job.requests[low];
    // The items of a head follow each other, so that its keys and values are still in the processor's own cache.
    const int64_t units_per_head = (job.requests[low + 1].first_unit - work.first_unit) / a.num_kv_heads;
    const int64_t kv_head = (unit - work.first_unit) / units_per_head;
    const int64_t within = (unit - work.first_unit) % units_per_head;
    if (work.num_splits > 1)
      attend_split<T>(job, work, b, item_at(a, low, kv_head, 0, job.tokens_per_item), within);
    else
      attend<T>(job, b, item_at(a, low, kv_head, within * job.tokens_per_item, job.tokens_per_item));
  }
}

PENSTOCK_INLINE int64_t chunks_of(const Item& item, const Cut& cut) {
  return (item.end - 1) / cut.chunk - item.begin / cut.chunk + 1;
}

static bool attention(const AttentionArgs& a) {
  const int64_t group = a.num_heads / a.num_kv_heads, size = a.head_size;
  const int64_t tokens_per_item = group < kQueryRows ? kQueryRows / group : 1;
  const Cut cut(a.block_size);
  bool writes_first = false;
  int64_t num_chunks = 0, num_elements = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t tokens = a.query_start[r + 1] - a.query_start[r];
    writes_first |= tokens > (a.num_requests > 1 ? 1 : tokens_per_item);
    const Item item = item_at(a, r, 0, 0, tokens);
    num_chunks += chunks_of(item, cut) * ((tokens + tokens_per_item - 1) / tokens_per_item) * a.num_kv_heads;
    num_elements += (item.end - item.begin) * tokens * a.num_heads * size;
  }
  const int num_threads = num_elements < kAloneAttention ? 1 : a.num_threads;
  // An item is split when it is more than a quarter of a thread's share; what is split is then few.
  const int64_t most_chunks = num_threads == 1 ? INT64_MAX : num_chunks / (4 * num_threads) + 1;

  static thread_local Scratch scratch;
  int64_t num_partials = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t tokens = a.query_start[r + 1] - a.query_start[r];
    const int64_t chunks = chunks_of(item_at(a, r, 0, 0, tokens), cut);
    if (tokens <= tokens_per_item && chunks > most_chunks)
      num_partials += a.num_kv_heads * chunks * tokens * group * sums_size(size);
  }
  const size_t work_floats = (a.num_requests + 1) * (sizeof(RequestWork) / sizeof(float));
  float* memory = scratch.get(work_floats + static_cast<size_t>(a.num_requests * a.num_kv_heads + num_partials));
  if (memory == nullptr) return false;
  auto* work = reinterpret_cast<RequestWork*>(memory);
  auto* left = reinterpret_cast<int32_t*>(memory + work_floats);
  float* partial = memory + work_floats + a.num_requests * a.num_kv_heads;
  work[0].first_unit = 0;
  for (int64_t r = 0; r < a.num_requests; ++r, left += a.num_kv_heads) {
    const int64_t tokens = a.query_start[r + 1] - a.query_start[r];
    const int64_t chunks = chunks_of(item_at(a, r, 0, 0, tokens), cut);
    const bool is_split = tokens <= tokens_per_item && chunks > most_chunks;
    work[r].num_splits = is_split ? chunks : 1;
    work[r].partial = partial;
    work[r].left = left;
    for (int64_t head = 0; head < a.num_kv_heads; ++head) left[head] = static_cast<int32_t>(chunks);
    if (is_split) partial += a.num_kv_heads * chunks * tokens * group * sums_size(size);
    const int64_t items = (tokens + tokens_per_item - 1) / tokens_per_item;
    work[r + 1].first_unit = work[r].first_unit + items * work[r].num_splits * a.num_kv_heads;
  }
  AttentionJob job{&a, work, cut, tokens_per_item, writes_first, work[a.num_requests].first_unit, false};
  switch (a.cache_type) {
    case CacheType::kFloat32: run_parallel(num_threads, attention_thread<float>, &job); break;
    case CacheType::kBfloat16: run_parallel(num_threads, attention_thread<uint16_t>, &job); break;
    case CacheType::kInt8: run_parallel(num_threads, attention_thread<int8_t>, &job); break;
  }
  return !job.has_failed;
}

}  // namespace PENSTOCK_NAMESPACE
