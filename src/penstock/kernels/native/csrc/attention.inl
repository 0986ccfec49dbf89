// Causal attention over the paged cache, with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
//
// The unit of work is one KV head of one request and a few of its queries, whose rows are the query heads that share
// the KV head. Positions are taken in tiles that begin at fixed multiples, and each row has chains of additions of its
// own: a row's result has the same bits however its request was cut into steps, and whatever else runs.

namespace PENSTOCK_NAMESPACE {

constexpr int64_t kQueryRows = 24;
constexpr int64_t kTilePositions = 64;
constexpr float kMinusInfinity = -__builtin_inff();

// Positions of a tile that lie one after the other in memory: `count` of them, from `offset` in the tile.
struct Segment {
  const float* values;
  int64_t offset, count;
};

// Scores of R rows with B blocks of keys, V vectors of positions each: out[i][.] = sum over d of x[i][d] * keys[d][.].
//
// Few rows take two blocks at once: a single chain of additions per vector would wait for itself.
template <int R, int B, int V>
static __attribute__((noinline)) void score(const float* x, const float* const* keys, int64_t block_size, int64_t size,
                                            float* const* out, int64_t out_stride) {
  Vec sum[R][B][V] = {};
  for (int64_t d = 0; d < size; ++d) {
    Vec key[B][V];
    for (int b = 0; b < B; ++b)
      for (int v = 0; v < V; ++v) key[b][v] = load(keys[b] + d * block_size + v * kLanes);
    for (int i = 0; i < R; ++i) {
      const Vec xi = splat(x[i * size + d]);
      for (int b = 0; b < B; ++b)
        for (int v = 0; v < V; ++v) sum[i][b][v] += xi * key[b][v];
    }
  }
  for (int i = 0; i < R; ++i)
    for (int b = 0; b < B; ++b)
      for (int v = 0; v < V; ++v) store(out[b] + i * out_stride + v * kLanes, sum[i][b][v]);
}

template <int B, int V>
PENSTOCK_INLINE void score_rows(int64_t rows, const float* x, const float* const* keys, int64_t block_size,
                                int64_t size, float* const* out, int64_t out_stride) {
  float* at[B];
  for (int b = 0; b < B; ++b) at[b] = out[b];
  while (rows > 0) {
    // Two blocks of more than three rows would not fit into the registers.
    const int64_t now = rows < (B == 1 ? 6 : 3) ? rows : (B == 1 ? 6 : 3);
    switch (now) {
      case 1: score<1, B, V>(x, keys, block_size, size, at, out_stride); break;
      case 2: score<2, B, V>(x, keys, block_size, size, at, out_stride); break;
      case 3: score<3, B, V>(x, keys, block_size, size, at, out_stride); break;
      case 4: score<B == 1 ? 4 : 1, B, V>(x, keys, block_size, size, at, out_stride); break;
      case 5: score<B == 1 ? 5 : 1, B, V>(x, keys, block_size, size, at, out_stride); break;
      default: score<B == 1 ? 6 : 1, B, V>(x, keys, block_size, size, at, out_stride); break;
    }
    rows -= now;
    x += now * size;
    for (int b = 0; b < B; ++b) at[b] += now * out_stride;
  }
}

// Scores of one block in widths that are not whole pairs of vectors.
static void score_columns(int64_t rows, const float* x, const float* keys, int64_t block_size, int64_t first,
                          int64_t size, float* out, int64_t out_stride) {
  for (int64_t column = first; column < block_size; ++column)
    for (int64_t i = 0; i < rows; ++i) {
      float sum = 0.0f;
      for (int64_t d = 0; d < size; ++d) sum += x[i * size + d] * keys[d * block_size + column];
      out[i * out_stride + column] = sum;
    }
}

// out[i][.] += sum over positions of weights[i][position] * values[position][.], for R rows and V vectors.
template <int R, int V>
static __attribute__((noinline)) void weigh(const float* weights, int64_t weights_stride, const Segment* segments,
                                            int num_segments, int64_t column, int64_t size, float* out) {
  Vec sum[R][V];
  for (int i = 0; i < R; ++i)
    for (int v = 0; v < V; ++v) sum[i][v] = load(out + i * size + column + v * kLanes);
  for (int s = 0; s < num_segments; ++s) {
    const float* values = segments[s].values + column;
    const float* weight = weights + segments[s].offset;
    for (int64_t k = 0; k < segments[s].count; ++k) {
      Vec value[V];
      for (int v = 0; v < V; ++v) value[v] = load(values + k * size + v * kLanes);
      for (int i = 0; i < R; ++i) {
        const Vec wi = splat(weight[i * weights_stride + k]);
        for (int v = 0; v < V; ++v) sum[i][v] += wi * value[v];
      }
    }
  }
  for (int i = 0; i < R; ++i)
    for (int v = 0; v < V; ++v) store(out + i * size + column + v * kLanes, sum[i][v]);
}

// All columns of R rows: few rows in four vectors at once, then two, then one, then single elements.
template <int R>
PENSTOCK_INLINE void weigh_rows(const float* weights, int64_t weights_stride, const Segment* segments,
                                int num_segments, int64_t size, float* out) {
  int64_t column = 0;
  if (R <= 3)
    for (; column + 4 * kLanes <= size; column += 4 * kLanes)
      weigh<R, R <= 3 ? 4 : 1>(weights, weights_stride, segments, num_segments, column, size, out);
  for (; column + 2 * kLanes <= size; column += 2 * kLanes)
    weigh<R, 2>(weights, weights_stride, segments, num_segments, column, size, out);
  for (; column + kLanes <= size; column += kLanes)
    weigh<R, 1>(weights, weights_stride, segments, num_segments, column, size, out);
  for (; column < size; ++column)
    for (int i = 0; i < R; ++i)
      for (int s = 0; s < num_segments; ++s)
        for (int64_t k = 0; k < segments[s].count; ++k)
          out[i * size + column] +=
              weights[i * weights_stride + segments[s].offset + k] * segments[s].values[k * size + column];
}

static void weigh_all(int64_t rows, const float* weights, int64_t weights_stride, const Segment* segments,
                      int num_segments, int64_t size, float* out) {
  for (; rows >= 6; rows -= 6, weights += 6 * weights_stride, out += 6 * size)
    weigh_rows<6>(weights, weights_stride, segments, num_segments, size, out);
  switch (rows) {
    case 5: return weigh_rows<5>(weights, weights_stride, segments, num_segments, size, out);
    case 4: return weigh_rows<4>(weights, weights_stride, segments, num_segments, size, out);
    case 3: return weigh_rows<3>(weights, weights_stride, segments, num_segments, size, out);
    case 2: return weigh_rows<2>(weights, weights_stride, segments, num_segments, size, out);
    case 1: return weigh_rows<1>(weights, weights_stride, segments, num_segments, size, out);
    default: return;
  }
}

struct AttentionJob {
  const AttentionArgs* args;
  const int64_t* first_item;  // [requests + 1]: work items of each request begin here
  int64_t tokens_per_item;
  int64_t next_item;  // counted down by the threads
  bool has_failed;    // a thread found no memory to work in
};

// Buffers of one thread.
struct AttentionBuffers {
  float* query;   // [rows][head_size], scaled
  float* scores;  // [rows][tile]
  float* sum;     // [rows][head_size], weighted values so far
  float* peak;    // [rows], largest score so far
  float* mass;    // [rows], sum of the weights so far
};

static void write_cache(const AttentionArgs& a, int thread, int num_threads) {
  const int64_t num_tokens = a.query_start[a.num_requests];
  const int64_t begin = num_tokens * thread / num_threads, end = num_tokens * (thread + 1) / num_threads;
  int64_t request = 0;
  for (int64_t token = begin; token < end; ++token) {
    while (token >= a.query_start[request + 1]) ++request;
    const int64_t position = a.seq_lens[request] - a.query_start[request + 1] + token;
    const int64_t block = a.block_table[request * a.block_table_stride + position / a.block_size];
    const int64_t offset = position % a.block_size;
    for (int64_t head = 0; head < a.num_kv_heads; ++head) {
      const int64_t at = (block * a.num_kv_heads + head) * a.block_size * a.head_size;
      const float* key = a.key + token * a.key_stride + head * a.head_size;
      float* key_column = a.key_cache + at + offset;
      for (int64_t d = 0; d < a.head_size; ++d) key_column[d * a.block_size] = key[d];
      std::memcpy(a.value_cache + at + offset * a.head_size, a.value + token * a.value_stride + head * a.head_size,
                  a.head_size * sizeof(float));
    }
  }
}

// One row's scores of a tile become weights; what it has summed up so far is rescaled to the new peak.
PENSTOCK_INLINE void softmax_row(const AttentionArgs& a, float* scores, int64_t tile, int64_t from, int64_t to,
                                 float& peak, float& mass, float* sum) {
  const int64_t padded = (tile + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = 0; i < from; ++i) scores[i] = kMinusInfinity;
  for (int64_t i = to; i < padded; ++i) scores[i] = kMinusInfinity;
  Vec most = splat(kMinusInfinity);
  for (int64_t i = 0; i < padded; i += kLanes) {
    Vec s = load(scores + i);
    if (a.soft_cap != 0.0f) {
      const IntVec is_hidden = s == kMinusInfinity;
      s = is_hidden ? s : a.soft_cap * tanh(s / a.soft_cap);
      store(scores + i, s);
    }
    most = max(s, most);
  }
  const float old_peak = peak;
  const float tile_peak = max_lanes(most);
  peak = tile_peak > old_peak ? tile_peak : old_peak;
  if (tile_peak > old_peak && mass != 0.0f) {
    const float shrink = exp(splat(old_peak - peak))[0];
    mass *= shrink;
    for (int64_t d = 0; d < a.head_size; ++d) sum[d] *= shrink;
  }
  Vec total = {};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Vec weight = exp(load(scores + i) - peak);
    store(scores + i, weight);
    total += weight;
  }
  mass += sum_lanes(total);
}

static void attend(const AttentionArgs& a, const AttentionBuffers& buffers, int64_t request, int64_t kv_head,
                   int64_t first_query, int64_t num_queries) {
  const int64_t size = a.head_size, block_size = a.block_size;
  const int64_t group = a.num_heads / a.num_kv_heads, rows = num_queries * group;
  const int64_t query_len = a.query_start[request + 1] - a.query_start[request];
  const int64_t first_token = a.query_start[request] + first_query;
  const int64_t first_position = a.seq_lens[request] - query_len + first_query;
  const int64_t end = first_position + num_queries;
  const int64_t begin = a.window > 0 && first_position >= a.window ? first_position - a.window + 1 : 0;
  const int64_t tile = block_size >= kTilePositions ? block_size : kTilePositions / block_size * block_size;
  const int64_t tile_stride = (tile + kLanes - 1) / kLanes * kLanes;
  const int32_t* blocks = a.block_table + request * a.block_table_stride;

  for (int64_t q = 0; q < num_queries; ++q)
    for (int64_t g = 0; g < group; ++g) {
      const float* from = a.query + (first_token + q) * a.query_stride + (kv_head * group + g) * size;
      float* to = buffers.query + (q * group + g) * size;
      for (int64_t d = 0; d < size; ++d) to[d] = from[d] * a.scale;
    }
  for (int64_t row = 0; row < rows; ++row) {
    buffers.peak[row] = kMinusInfinity;
    buffers.mass[row] = 0.0f;
  }
  for (int64_t i = 0; i < rows * size; ++i) buffers.sum[i] = 0.0f;

  for (int64_t start = begin / tile * tile; start < end; start += tile) {
    const int64_t stop = start + tile < end ? start + tile : end;
    const int64_t first_block = (start > begin ? start : begin) / block_size;
    const int64_t end_block = (stop + block_size - 1) / block_size;
    const int64_t paired = rows <= 3 ? 2 : 1;
    for (int64_t block = first_block; block < end_block;) {
      const int64_t now = end_block - block < paired ? end_block - block : paired;
      const float* keys[2];
      float* scores[2];
      for (int64_t b = 0; b < now; ++b) {
        keys[b] = a.key_cache + (blocks[block + b] * a.num_kv_heads + kv_head) * block_size * size;
        scores[b] = buffers.scores + (block + b) * block_size - start;
      }
      int64_t column = 0;
      for (; column + 2 * kLanes <= block_size; column += 2 * kLanes) {
        const float* keys_now[2] = {keys[0] + column, keys[now - 1] + column};
        float* scores_now[2] = {scores[0] + column, scores[now - 1] + column};
        if (now == 2)
          score_rows<2, 2>(rows, buffers.query, keys_now, block_size, size, scores_now, tile_stride);
        else
          score_rows<1, 2>(rows, buffers.query, keys_now, block_size, size, scores_now, tile_stride);
      }
      for (; column + kLanes <= block_size; column += kLanes)
        for (int64_t b = 0; b < now; ++b) {
          const float* keys_now[1] = {keys[b] + column};
          float* scores_now[1] = {scores[b] + column};
          score_rows<1, 1>(rows, buffers.query, keys_now, block_size, size, scores_now, tile_stride);
        }
      for (int64_t b = 0; b < now; ++b)
        score_columns(rows, buffers.query, keys[b], block_size, column, size, scores[b], tile_stride);
      block += now;
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = first_position + row / group;
      const int64_t seen_from = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
      int64_t from = seen_from > start ? seen_from - start : 0;
      int64_t to = position + 1 < stop ? position + 1 - start : stop - start;
      float* scores = buffers.scores + row * tile_stride;
      if (from >= to) {  // nothing of this tile is visible
        for (int64_t i = 0; i < tile_stride; ++i) scores[i] = 0.0f;
      } else {
        softmax_row(a, scores, tile, from, to, buffers.peak[row], buffers.mass[row], buffers.sum + row * size);
      }
    }
    // Positions outside begin .. end are not read: what lies there is not this request's, and may not be a number.
    Segment segments[kTilePositions];
    int num_segments = 0;
    for (int64_t block = first_block; block < end_block; ++block) {
      const int64_t from = block * block_size > begin ? block * block_size : begin;
      const int64_t to = (block + 1) * block_size < stop ? (block + 1) * block_size : stop;
      const float* values = a.value_cache + (blocks[block] * a.num_kv_heads + kv_head) * block_size * size;
      segments[num_segments++] = {values + from % block_size * size, from - start, to - from};
    }
    weigh_all(rows, buffers.scores, tile_stride, segments, num_segments, size, buffers.sum);
  }
  for (int64_t q = 0; q < num_queries; ++q)
    for (int64_t g = 0; g < group; ++g) {
      const int64_t row = q * group + g;
      float* to = a.out + (first_token + q) * a.out_stride + (kv_head * group + g) * size;
      const float scale = 1.0f / buffers.mass[row];
      for (int64_t d = 0; d < size; ++d) to[d] = buffers.sum[row * size + d] * scale;
    }
}

static void attention_thread(void* data, int thread, const Team& team) {
  auto& job = *static_cast<AttentionJob*>(data);
  const AttentionArgs& a = *job.args;
  write_cache(a, thread, team.num_threads);
  team.barrier();

  const int64_t group = a.num_heads / a.num_kv_heads, rows = job.tokens_per_item * group;
  const int64_t tile = (a.block_size > kTilePositions ? a.block_size : kTilePositions) + kLanes;
  static thread_local Scratch scratch;
  float* memory = scratch.get(static_cast<size_t>(rows * (2 * a.head_size + tile + 2)));
  if (memory == nullptr) {
    __atomic_store_n(&job.has_failed, true, __ATOMIC_RELAXED);
    return;
  }
  AttentionBuffers b;
  b.query = memory;
  b.sum = b.query + rows * a.head_size;
  b.scores = b.sum + rows * a.head_size;
  b.peak = b.scores + rows * tile;
  b.mass = b.peak + rows;
  // From the last item to the first: requests come by rising number of tokens, and the longest should begin first.
  for (;;) {
    const int64_t item = __atomic_sub_fetch(&job.next_item, 1, __ATOMIC_RELAXED);
    if (item < 0) return;
    int64_t low = 0, high = a.num_requests;  // first_item[low] <= item < first_item[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (job.first_item[middle] <= item ? low : high) = middle;
    }
    const int64_t within = item - job.first_item[low];
    const int64_t first_query = within / a.num_kv_heads * job.tokens_per_item;
    const int64_t left = a.query_start[low + 1] - a.query_start[low] - first_query;
    attend(a, b, low, within % a.num_kv_heads, first_query, left < job.tokens_per_item ? left : job.tokens_per_item);
  }
}

static bool attention(const AttentionArgs& a) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t tokens_per_item = group < kQueryRows ? kQueryRows / group : 1;
  static thread_local Scratch scratch;
  // As many 64-bit counts as fit in floats, twice.
  auto* first_item = reinterpret_cast<int64_t*>(scratch.get(static_cast<size_t>(a.num_requests + 1) * 2));
  if (first_item == nullptr) return false;
  first_item[0] = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t tokens = a.query_start[r + 1] - a.query_start[r];
    first_item[r + 1] = first_item[r] + (tokens + tokens_per_item - 1) / tokens_per_item * a.num_kv_heads;
  }
  AttentionJob job{&a, first_item, tokens_per_item, first_item[a.num_requests], false};
  run_parallel(a.num_threads, attention_thread, &job);
  return !job.has_failed;
}

}  // namespace PENSTOCK_NAMESPACE
