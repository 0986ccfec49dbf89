// Causal attention over the paged cache, with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
//
// The unit of work is one KV head of one request and a few of its queries, whose rows are the query heads that share
// the KV head. Positions are taken in tiles that begin at fixed multiples, and each row has chains of additions of its
// own: a row's result has the same bits however its request was cut into steps, and whatever else runs.

namespace PENSTOCK_NAMESPACE {

constexpr int64_t kQueryRows = 24;
constexpr int64_t kTilePositions = 64;
constexpr float kMinusInfinity = -__builtin_inff();

// out[i][.] += sum over k of x[i][k] * w[k][.], for R rows and V vectors.
template <int R, int V>
static __attribute__((noinline)) void accumulate(const float* x, int64_t x_stride, const float* w, int64_t w_stride,
                                                 int64_t depth, float* out, int64_t out_stride, bool from_zero) {
  Vec sum[R][V];
  for (int i = 0; i < R; ++i)
    for (int v = 0; v < V; ++v) sum[i][v] = from_zero ? Vec{} : load(out + i * out_stride + v * kLanes);
  for (int64_t k = 0; k < depth; ++k) {
    Vec wk[V];
    for (int v = 0; v < V; ++v) wk[v] = load(w + k * w_stride + v * kLanes);
    for (int i = 0; i < R; ++i) {
      const Vec xi = splat(x[i * x_stride + k]);
      for (int v = 0; v < V; ++v) sum[i][v] += xi * wk[v];
    }
  }
  for (int i = 0; i < R; ++i)
    for (int v = 0; v < V; ++v) store(out + i * out_stride + v * kLanes, sum[i][v]);
}

template <int V>
PENSTOCK_INLINE void accumulate_rows(int64_t rows, const float* x, int64_t x_stride, const float* w, int64_t w_stride,
                                     int64_t depth, float* out, int64_t out_stride, bool from_zero) {
  for (; rows >= 6; rows -= 6, x += 6 * x_stride, out += 6 * out_stride)
    accumulate<6, V>(x, x_stride, w, w_stride, depth, out, out_stride, from_zero);
  switch (rows) {
    case 5: return accumulate<5, V>(x, x_stride, w, w_stride, depth, out, out_stride, from_zero);
    case 4: return accumulate<4, V>(x, x_stride, w, w_stride, depth, out, out_stride, from_zero);
    case 3: return accumulate<3, V>(x, x_stride, w, w_stride, depth, out, out_stride, from_zero);
    case 2: return accumulate<2, V>(x, x_stride, w, w_stride, depth, out, out_stride, from_zero);
    case 1: return accumulate<1, V>(x, x_stride, w, w_stride, depth, out, out_stride, from_zero);
    default: return;
  }
}

// Rows of any width: in pairs of vectors, then one vector, then single elements.
static void accumulate_wide(int64_t rows, const float* x, int64_t x_stride, const float* w, int64_t w_stride,
                            int64_t depth, float* out, int64_t out_stride, int64_t width, bool from_zero) {
  int64_t column = 0;
  for (; column + 2 * kLanes <= width; column += 2 * kLanes)
    accumulate_rows<2>(rows, x, x_stride, w + column, w_stride, depth, out + column, out_stride, from_zero);
  for (; column + kLanes <= width; column += kLanes)
    accumulate_rows<1>(rows, x, x_stride, w + column, w_stride, depth, out + column, out_stride, from_zero);
  for (; column < width; ++column)
    for (int64_t i = 0; i < rows; ++i) {
      float sum = from_zero ? 0.0f : out[i * out_stride + column];
      for (int64_t k = 0; k < depth; ++k) sum += x[i * x_stride + k] * w[k * w_stride + column];
      out[i * out_stride + column] = sum;
    }
}

struct AttentionJob {
  const AttentionArgs* args;
  const int64_t* first_item;  // [requests + 1]: work items of each request begin here
  int64_t tokens_per_item;
  int64_t next_item;  // counted down by the threads
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

static void attend(const AttentionArgs& a, const AttentionBuffers& b, int64_t request, int64_t kv_head,
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
      float* to = b.query + (q * group + g) * size;
      for (int64_t d = 0; d < size; ++d) to[d] = from[d] * a.scale;
    }
  for (int64_t row = 0; row < rows; ++row) {
    b.peak[row] = kMinusInfinity;
    b.mass[row] = 0.0f;
  }
  for (int64_t i = 0; i < rows * size; ++i) b.sum[i] = 0.0f;

  for (int64_t start = begin / tile * tile; start < end; start += tile) {
    const int64_t stop = start + tile < end ? start + tile : end;
    const int64_t first_block = (start > begin ? start : begin) / block_size;
    for (int64_t block = first_block; block * block_size < stop; ++block) {
      const float* keys = a.key_cache + (blocks[block] * a.num_kv_heads + kv_head) * block_size * size;
      accumulate_wide(rows, b.query, size, keys, block_size, size, b.scores + block * block_size - start, tile_stride,
                      block_size, true);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = first_position + row / group;
      const int64_t seen_from = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
      int64_t from = seen_from > start ? seen_from - start : 0;
      int64_t to = position + 1 < stop ? position + 1 - start : stop - start;
      float* scores = b.scores + row * tile_stride;
      if (from >= to) {  // nothing of this tile is visible
        for (int64_t i = 0; i < tile_stride; ++i) scores[i] = 0.0f;
      } else {
        softmax_row(a, scores, tile, from, to, b.peak[row], b.mass[row], b.sum + row * size);
      }
    }
    // Positions outside begin .. end are not read: what lies there is not this request's, and may not be a number.
    for (int64_t block = first_block; block * block_size < stop; ++block) {
      const int64_t from = block * block_size > begin ? block * block_size : begin;
      const int64_t to = (block + 1) * block_size < stop ? (block + 1) * block_size : stop;
      const float* values = a.value_cache + (blocks[block] * a.num_kv_heads + kv_head) * block_size * size;
      accumulate_wide(rows, b.scores + from - start, tile_stride, values + from % block_size * size, size, to - from,
                      b.sum, size, size, false);
    }
  }
  for (int64_t q = 0; q < num_queries; ++q)
    for (int64_t g = 0; g < group; ++g) {
      const int64_t row = q * group + g;
      float* to = a.out + (first_token + q) * a.out_stride + (kv_head * group + g) * size;
      const float scale = 1.0f / b.mass[row];
      for (int64_t d = 0; d < size; ++d) to[d] = b.sum[row * size + d] * scale;
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

static void attention(const AttentionArgs& a) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t tokens_per_item = group < kQueryRows ? kQueryRows / group : 1;
  static thread_local Scratch scratch;
  // As many 64-bit counts as fit in floats, twice.
  auto* first_item = reinterpret_cast<int64_t*>(scratch.get(static_cast<size_t>(a.num_requests + 1) * 2));
  first_item[0] = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t tokens = a.query_start[r + 1] - a.query_start[r];
    first_item[r + 1] = first_item[r] + (tokens + tokens_per_item - 1) / tokens_per_item * a.num_kv_heads;
  }
  AttentionJob job{&a, first_item, tokens_per_item, first_item[a.num_requests]};
  run_parallel(a.num_threads, attention_thread, &job);
}

}  // namespace PENSTOCK_NAMESPACE
