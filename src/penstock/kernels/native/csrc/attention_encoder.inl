// Attention of whole texts in both directions, without a KV cache: encoders, and decoders that are made one.
//
// A work unit is one KV head of one text, and a range of its queries. Keys are packed in tiles of
// [dimension][position], values as [position][dimension]; then a few queries at a time have their scores for the whole
// text, a softmax, and their weighted sum of values. Every result is one chain of additions in rising order of
// position, so that a text has the same bits alone and in any batch. Values are padded to whole vectors, since some
// encoders of images have heads of 72.

namespace PENSTOCK_NAMESPACE {

// Units below which a text's queries are divided among the threads.
constexpr int64_t kFewUnits = 4;

struct EncoderJob {
  const AttentionArgs* args;
  int64_t longest;  // tokens of the longest text
  int64_t parts;    // ranges of queries per text and KV head
  int64_t next;     // units not taken yet; threads count it down
  bool has_failed;  // scratch allocation failed on a thread
};

struct EncoderBuffers {
  float* keys;    // [tiles][head_size][kTilePositions]
  float* values;  // [tokens][width]
  float* query;   // [kQueryRows][head_size]
  float* scores;  // [kQueryRows][stride]
  float* out;     // [kQueryRows][width]
  float* keep;    // [kQueryRows] ones
  int64_t stride;
  int64_t width;  // head_size in whole vectors
};

PENSTOCK_INLINE int64_t tiles_for(int64_t tokens) { return (tokens + kTilePositions - 1) / kTilePositions; }

// Packs the keys and values of one KV head of a text that begins at token `first`. Positions after its end are zero.
static void pack_text(const AttentionArgs& a, int64_t first, int64_t tokens, int64_t kv_head, const EncoderBuffers& b) {
  const int64_t size = a.head_size, whole = tiles_for(tokens) * kTilePositions;
  for (int64_t position = 0; position < whole; ++position) {
    float* tile = b.keys + position / kTilePositions * size * kTilePositions + position % kTilePositions;
    if (position >= tokens) {
      for (int64_t d = 0; d < size; ++d) tile[d * kTilePositions] = 0.0f;
      continue;
    }
    const int64_t token = first + position;
    prepare_head(a, a.key + token * a.key_stride + kv_head * size, a.num_heads + kv_head, token, 1.0f, b.query);
    for (int64_t d = 0; d < size; ++d) tile[d * kTilePositions] = b.query[d];
    float* values = b.values + position * b.width;
    std::memcpy(values, a.value + token * a.value_stride + kv_head * size, size * sizeof(float));
    for (int64_t d = size; d < b.width; ++d) values[d] = 0.0f;
  }
}

// Positions that a query sees: all of the text, or up to `window` on either side.
PENSTOCK_INLINE Visible seen_by(const AttentionArgs& a, int64_t position, int64_t tokens) {
  if (a.window <= 0) return {0, tokens};
  const int64_t from = position - a.window, to = position + a.window + 1;
  return {from > 0 ? from : 0, to < tokens ? to : tokens};
}

// Attention of up to kQueryRows rows: query heads of one KV head, of the tokens from `position` on.
static void attend_rows(const AttentionArgs& a, const EncoderBuffers& b, int64_t first, int64_t tokens, int64_t kv_head,
                        int64_t position, int64_t rows) {
  const int64_t group = a.num_heads / a.num_kv_heads, size = a.head_size, width = b.width;
  const auto token_of = [&](int64_t row) { return position + row / group; };
  const auto head_of = [&](int64_t row) { return kv_head * group + row % group; };
  int64_t begin = tokens, end = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = first + token_of(row), head = head_of(row);
    prepare_head(a, a.query + token * a.query_stride + head * size, head, token, a.scale * kLog2e, b.query + row * size);
    const Visible visible = seen_by(a, token_of(row), tokens);
    begin = visible.from < begin ? visible.from : begin;
    end = visible.to > end ? visible.to : end;
  }
  const int64_t tile_size = size * kTilePositions, first_tile = begin / kTilePositions, end_tile = tiles_for(end);
  for (int64_t row = 0; row < rows;) {
    const int64_t count = rows_at_once(rows, row);
    const int64_t most = blocks_at_once<float>(count, kTilePositions);
    for (int64_t tile = first_tile; tile < end_tile;) {
      KeyBlock<float> blocks[kMostBlocks];
      int num_blocks = 0;
      for (; num_blocks < most && tile < end_tile; ++num_blocks, ++tile) {
        const float* keys = b.keys + tile * tile_size;
        blocks[num_blocks] = {keys, keys, b.scores + row * b.stride + tile * kTilePositions};
      }
      score_blocks(count, b.query + row * size, static_cast<const float*>(nullptr), blocks, num_blocks, kTilePositions,
                   size, b.stride);
    }
    row += count;
  }
  const int64_t offset = first_tile * kTilePositions, length = end_tile * kTilePositions;
  const Segment<float> segments[2] = {{b.values + offset * width, b.values + offset * width, 0, end - offset, 0},
                                      {nullptr, nullptr, end - offset, 0, 0}};
  float mass[kQueryRows];
  for (int64_t row = 0; row < rows; ++row) {
    Visible visible = seen_by(a, token_of(row), tokens);
    visible = {visible.from - offset, visible.to - offset};
    float* scores = b.scores + row * b.stride + offset;
    const float peak = find_peak(a.soft_cap * kLog2e, scores, visible, nullptr);
    mass[row] = sum_lanes(soften(scores, visible, length - offset, peak, nullptr, Vec{}));
  }
  std::memset(b.out, 0, rows * width * sizeof(float));
  for (int64_t row = 0; row < rows;) {
    const int64_t count = rows_at_once(rows, row);
    weigh_rows(count, b.scores + row * b.stride + offset, b.stride, static_cast<const float*>(nullptr), segments,
               end - offset, width, width, b.keep, b.out + row * width);
    row += count;
  }
  for (int64_t row = 0; row < rows; ++row) {
    const float scale = 1.0f / mass[row];
    float* to = a.out + (first + token_of(row)) * a.out_stride + head_of(row) * size;
    for (int64_t d = 0; d < size; ++d) to[d] = b.out[row * width + d] * scale;
  }
}

static void encoder_thread(void* data, int, const Team&) {
  auto& job = *static_cast<EncoderJob*>(data);
  const AttentionArgs& a = *job.args;
  const int64_t size = a.head_size, whole = tiles_for(job.longest) * kTilePositions;
  const int64_t width = (size + kLanes - 1) / kLanes * kLanes;
  const int64_t group = a.num_heads / a.num_kv_heads, tokens_at_once = group < kQueryRows ? kQueryRows / group : 1;
  const int64_t rows = tokens_at_once * group;
  static thread_local Scratch scratch;
  float* memory = scratch.get(static_cast<size_t>(whole * (size + width) + rows * (whole + size + width + 1)));
  if (memory == nullptr) return __atomic_store_n(&job.has_failed, true, __ATOMIC_RELAXED);
  EncoderBuffers b;
  b.keys = memory;
  b.values = b.keys + whole * size;
  b.scores = b.values + whole * width;
  b.query = b.scores + rows * whole;
  b.out = b.query + rows * size;
  b.keep = b.out + rows * width;
  b.stride = whole;
  b.width = width;
  for (int64_t row = 0; row < rows; ++row) b.keep[row] = 1.0f;
  for (;;) {
    // The longest texts, which come last, are taken first.
    const int64_t unit = __atomic_sub_fetch(&job.next, 1, __ATOMIC_RELAXED);
    if (unit < 0) return;
    const int64_t part = unit % job.parts, kv_head = unit / job.parts % a.num_kv_heads;
    const int64_t request = unit / job.parts / a.num_kv_heads;
    const int64_t first = a.query_start[request], tokens = tokens_of(a, request);
    // Queries that are computed together are the same in any division: with a window, the positions that one of them
    // sees are taken for all of them, and sums over lanes begin with the first.
    const int64_t blocks = (tokens + tokens_at_once - 1) / tokens_at_once;
    const int64_t begin = blocks * part / job.parts * tokens_at_once;
    const int64_t last = blocks * (part + 1) / job.parts * tokens_at_once, end = last < tokens ? last : tokens;
    if (begin >= end) continue;
    pack_text(a, first, tokens, kv_head, b);
    for (int64_t position = begin; position < end; position += tokens_at_once) {
      const int64_t left = end - position;
      attend_rows(a, b, first, tokens, kv_head, position, (left < tokens_at_once ? left : tokens_at_once) * group);
    }
  }
}

static bool encoder_attention(const AttentionArgs& a) {
  EncoderJob job{&a, 0, 1, 0, false};
  int64_t num_elements = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t tokens = tokens_of(a, r);
    job.longest = tokens > job.longest ? tokens : job.longest;
    num_elements += tokens * tokens * a.num_heads * a.head_size;
  }
  const int num_threads = num_elements < kAloneAttention ? 1 : a.num_threads;
  const int64_t units = a.num_requests * a.num_kv_heads;
  if (units > 0 && units < kFewUnits * num_threads && num_threads > 1)
    job.parts = (kFewUnits * num_threads + units - 1) / units;
  job.next = units * job.parts;
  run_parallel(num_threads, encoder_thread, &job);
  return !job.has_failed;
}

}  // namespace PENSTOCK_NAMESPACE
