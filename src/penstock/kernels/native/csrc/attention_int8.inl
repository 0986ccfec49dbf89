// attention_tiles.inl for an int8 KV cache: integer arithmetic, two products per instruction.
//
// A row's query, and its softmax weights of a tile, are quantised to int16 by their largest magnitude, a hundred times
// finer than the int8 cache. Their dot products accumulate in int32: exact in any order.

namespace PENSTOCK_NAMESPACE {

// Largest quantised magnitude such that `count` products with int8 cannot overflow an int32 sum.
PENSTOCK_INLINE float largest_of(int64_t count) {
  const int64_t fitting = INT32_MAX / (128 * count);
  return static_cast<float>(fitting < INT16_MAX ? fitting : INT16_MAX);
}

// Two int16 from narrow() as a pair, or one.
PENSTOCK_INLINE int32_t two_shorts(const char* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return pair;
}

PENSTOCK_INLINE int16_t one_short(const char* from) {
  int16_t number;
  std::memcpy(&number, from, sizeof number);
  return number;
}

// A row's int16 values.
PENSTOCK_INLINE const char* shorts_of(const float* row) { return reinterpret_cast<const char*>(row); }

// Quantises `count` floats to int16 in place, and returns their scale: NaN if any of them is not finite.
static __attribute__((noinline)) float narrow(float* x, int64_t count, float largest) {
  typedef int16_t Shorts __attribute__((vector_size(kLanes * 2)));
  const int64_t whole = count / kLanes * kLanes;
  Vec highest{}, poison{};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Vec v = load(x + i);
    highest = max(max(v, -v), highest);
    poison += v * 0.0f;
  }
  float most = max_lanes(highest), sick = sum_lanes(poison);
  for (int64_t i = whole; i < count; ++i) {
    most = __builtin_fabsf(x[i]) > most ? __builtin_fabsf(x[i]) : most;
    sick += x[i] * 0.0f;
  }
  const bool is_nothing = !(most > 1e-33f);
  const float factor = is_nothing ? 0.0f : largest / most;
  char* to = reinterpret_cast<char*>(x);
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Shorts rounded = __builtin_convertvector(round_to_int(load(x + i) * factor), Shorts);
    std::memcpy(to + i * sizeof(int16_t), &rounded, sizeof rounded);
  }
  for (int64_t i = whole; i < count; ++i) {
    const int16_t rounded = static_cast<int16_t>(round_to_int(splat(sick == 0.0f ? x[i] * factor : 0.0f))[0]);
    std::memcpy(to + i * sizeof rounded, &rounded, sizeof rounded);
  }
  if (count % 2 != 0) std::memset(to + count * sizeof(int16_t), 0, sizeof(int16_t));
  return (is_nothing ? 1.0f : most / largest) + sick;
}

// Quantises a row's softmax weights of a tile; positions not visible get weight 0.
PENSTOCK_INLINE float narrow_weights(float* weights, const Visible& visible, int64_t length, float largest) {
  for (int64_t i = visible.first(); i < visible.from; ++i) weights[i] = 0.0f;
  for (int64_t i = visible.to; i < length; ++i) weights[i] = 0.0f;
  return narrow(weights, length, largest);
}

// Scores of R rows with B blocks, V vectors of positions each: scores[i][.] = scale[i] * sum over d of x[i][d] *
// keys[d][.].
template <int R, int B, int V>
static __attribute__((noinline)) void score(const float* x, const float* scale, const KeyBlock<int8_t>* blocks,
                                            int64_t column, int64_t block_size, int64_t size, int64_t scores_stride) {
  IntVec sum[R][B][V] = {};
  int64_t d = 0;
  for (; d + 1 < size; d += 2) {
    const int64_t at = d * block_size + 2 * column;
    ShortVec key[B][V];
    PENSTOCK_UNROLL
    for (int b = 0; b < B; ++b) {
      if (R <= kFewRows) __builtin_prefetch(blocks[b].next + at, 0, 2);
      PENSTOCK_UNROLL
      for (int v = 0; v < V; ++v) key[b][v] = widen(load_bytes<HalfByteVec>(blocks[b].keys + at + v * 2 * kLanes));
    }
    PENSTOCK_UNROLL
    for (int i = 0; i < R; ++i) {
      const ShortVec xi = (ShortVec)splat_int(two_shorts(shorts_of(x + i * size) + d * sizeof(int16_t)));
      PENSTOCK_UNROLL
      for (int b = 0; b < B; ++b)
        PENSTOCK_UNROLL
        for (int v = 0; v < V; ++v) {
          sum[i][b][v] += dot_pairs(xi, key[b][v]);
          PENSTOCK_NEEDED_NOW(sum[i][b][v]);
        }
    }
  }
  for (; d < size; ++d)
    for (int i = 0; i < R; ++i) {
      const ShortVec xi = (ShortVec)splat_int(two_shorts(shorts_of(x + i * size) + d * sizeof(int16_t)));
      for (int b = 0; b < B; ++b)
        for (int v = 0; v < V; ++v) {
          const int8_t* keys = blocks[b].keys + d * block_size + column + v * kLanes;
          sum[i][b][v] += dot_pairs(xi, (ShortVec)widen_to_ints(keys));
        }
    }
  PENSTOCK_UNROLL
  for (int i = 0; i < R; ++i)
    PENSTOCK_UNROLL
    for (int b = 0; b < B; ++b)
      PENSTOCK_UNROLL
      for (int v = 0; v < V; ++v)
        store(blocks[b].scores + i * scores_stride + column + v * kLanes,
              __builtin_convertvector(sum[i][b][v], Vec) * scale[i]);
}

PENSTOCK_INLINE float score_one(const float* x, const float* scale, const KeyBlock<int8_t>& block, int64_t position,
                                int64_t block_size, int64_t size) {
  int32_t sum = 0;
  for (int64_t d = 0; d < size; ++d)
    sum += one_short(shorts_of(x) + d * sizeof(int16_t)) * block.keys[place_in_pairs(d, position, size, block_size)];
  return static_cast<float>(sum) * *scale;
}

// out[i][.] = out[i][.] * keep[i] + scale[i] * sum over positions before `limit` of weights[i][position] *
// values[position][.], for R rows, V vectors.
template <int R, int V>
static __attribute__((noinline)) void weigh(const float* weights, int64_t weights_stride, const float* scale,
                                            const Segment<int8_t>* segments, int64_t limit, int64_t column,
                                            int64_t size, int64_t, const float* keep, float* out) {
  IntVec sum[R][V] = {};
  for (; segments->offset < limit; ++segments) {
    const int8_t* values = segments->values + 2 * column;
    const int8_t* next = segments->next + 2 * column;
    const char* weight = shorts_of(weights) + segments->offset * sizeof(int16_t);
    const int64_t left = limit - segments->offset, count = left < segments->count ? left : segments->count;
    const int64_t in_pairs = count < segments->paired ? count : segments->paired;
    for (int64_t k = 0; k < in_pairs; k += 2) {
      ShortVec value[V];
      PENSTOCK_UNROLL
      for (int v = 0; v < V; ++v) {
        if (R <= kFewRows && v * 2 * kLanes % kLine == 0) __builtin_prefetch(next + k * size + v * 2 * kLanes, 0, 2);
        value[v] = widen(load_bytes<HalfByteVec>(values + k * size + v * 2 * kLanes));
      }
      PENSTOCK_UNROLL
      for (int i = 0; i < R; ++i) {
        const char* of_row = weight + i * weights_stride * sizeof(float);
        const ShortVec wi = (ShortVec)splat_int(two_shorts(of_row + k * sizeof(int16_t)));
        PENSTOCK_UNROLL
        for (int v = 0; v < V; ++v) {
          sum[i][v] += dot_pairs(wi, value[v]);
          PENSTOCK_NEEDED_NOW(sum[i][v]);
        }
      }
    }
    for (int64_t k = segments->paired; k < count; ++k)
      for (int i = 0; i < R; ++i) {
        const char* of_row = weight + i * weights_stride * sizeof(float);
        const ShortVec wi = (ShortVec)splat_int(static_cast<uint16_t>(one_short(of_row + k * sizeof(int16_t))));
        for (int v = 0; v < V; ++v)
          sum[i][v] += dot_pairs(wi, (ShortVec)widen_to_ints(segments->values + k * size + column + v * kLanes));
      }
  }
  PENSTOCK_UNROLL
  for (int i = 0; i < R; ++i)
    PENSTOCK_UNROLL
    for (int v = 0; v < V; ++v) {
      float* to = out + i * size + column + v * kLanes;
      Vec total = load(to) * keep[i];
      multiply_add(total, __builtin_convertvector(sum[i][v], Vec), splat(scale[i]));
      store(to, total);
    }
}

PENSTOCK_INLINE float weigh_one(const float* weights, const float* scale, const Segment<int8_t>* segments, int64_t limit,
                                int64_t column, int64_t size, int64_t, float before) {
  int32_t sum = 0;
  for (const Segment<int8_t>* s = segments; s->offset < limit; ++s)
    for (int64_t k = 0; k < s->count && s->offset + k < limit; ++k)
      sum += one_short(shorts_of(weights) + (s->offset + k) * sizeof(int16_t)) *
             s->values[place_in_pairs(k, column, s->paired, size)];
  Vec total = splat(before);
  multiply_add(total, splat(static_cast<float>(sum)), splat(*scale));
  return total[0];
}

}  // namespace PENSTOCK_NAMESPACE
