// Dot products of a few query rows with the keys of one tile, and of their softmax weights with its values.
//
// Every result is one chain of additions over dimensions or positions in rising order, whatever the shape of the
// register tile. Up to kFewRows rows are bound by memory rather than arithmetic: they prefetch the next tile while they
// process one.

namespace PENSTOCK_NAMESPACE {

// Without it, compilers keep a tile's accumulators in memory before and after the loop that has them in registers.
#define PENSTOCK_UNROLL _Pragma("GCC unroll 16")

// Scores are in units of ln 2, so that the softmax takes powers of 2.
constexpr float kLog2e = 1.44269504f;
constexpr float kMinusInfinity = -__builtin_inff();
constexpr int kFewRows = 4;
constexpr int kManyRows = 6;
constexpr int64_t kLine = 64;  // bytes of a cache line

template <class T>
constexpr bool kIsInt8 = false;
template <>
constexpr bool kIsInt8<int8_t> = true;

// With 32 registers, four accumulator vectors per row always fit. With 16: four for at most this many rows, two for
// more; integer products need one more register.
constexpr bool kHasManyRegisters = kLanes == 16;
template <class T>
constexpr int kRowsOfFourVectors = kHasManyRegisters ? kManyRows : kIsInt8<T> ? 2 : 3;

// Accumulator vectors per row. A single chain of additions would be bound by latency, and more vectors share each
// loaded operand.
template <class T>
constexpr int vectors_at_once(int64_t rows) {
  return rows <= kRowsOfFourVectors<T> ? 4 : 2;
}

// Blocks per register tile, with one or two vectors of positions each.
constexpr int kMostBlocks = 4;
template <class T>
PENSTOCK_INLINE int blocks_at_once(int64_t rows, int64_t block_size) {
  return vectors_at_once<T>(rows < kManyRows ? rows : kManyRows) / (block_size >= 2 * kLanes ? 2 : 1);
}

// Keys of a block, and of the block to prefetch, one tile later.
template <class T>
struct KeyBlock {
  const T* keys;
  const T* next;
  float* scores;  // of the first row
};

// Contiguous positions of a tile in memory: `count` of them, from `offset` in the tile.
template <class T>
struct Segment {
  const T* values;
  const T* next;
  int64_t offset, count;
  int64_t paired;  // int8: leading positions, up to the block's end, that are interleaved
};

// Scores of R rows with B blocks, V vectors of positions each: scores[i][.] = sum over d of x[i][d] * keys[d][.].
//
// attention_int8.inl overloads this and the next three functions for int8. scale: per row, used only there.
template <int R, int B, int V, class T>
static __attribute__((noinline)) void score(const float* x, const float*, const KeyBlock<T>* blocks, int64_t column,
                                            int64_t block_size, int64_t size, int64_t scores_stride) {
  Vec sum[R][B][V] = {};
  for (int64_t d = 0; d < size; ++d) {
    const int64_t at = d * block_size + column;
    Vec key[B][V];
    PENSTOCK_UNROLL
    for (int b = 0; b < B; ++b) {
      if (R <= kFewRows) __builtin_prefetch(blocks[b].next + at, 0, 2);
      PENSTOCK_UNROLL
      for (int v = 0; v < V; ++v) key[b][v] = widen(blocks[b].keys + at + v * kLanes);
    }
    PENSTOCK_UNROLL
    for (int i = 0; i < R; ++i) {
      const Vec xi = splat(x[i * size + d]);
      PENSTOCK_UNROLL
      for (int b = 0; b < B; ++b)
        PENSTOCK_UNROLL
        for (int v = 0; v < V; ++v) multiply_add(sum[i][b][v], xi, key[b][v]);
    }
  }
  PENSTOCK_UNROLL
  for (int i = 0; i < R; ++i)
    PENSTOCK_UNROLL
    for (int b = 0; b < B; ++b)
      PENSTOCK_UNROLL
      for (int v = 0; v < V; ++v) store(blocks[b].scores + i * scores_stride + column + v * kLanes, sum[i][b][v]);
}

// One score.
template <class T>
PENSTOCK_INLINE float score_one(const float* x, const float*, const KeyBlock<T>& block, int64_t position,
                                int64_t block_size, int64_t size) {
  float sum = 0.0f;
  for (int64_t d = 0; d < size; ++d) sum += x[d] * widen(block.keys[d * block_size + position]);
  return sum;
}

// out[i][.] = out[i][.] * keep[i] + sum over positions before `limit` of weights[i][position] * values[position][.],
// for R rows, V vectors.
//
// apart: elements from one position's value to the next.
template <int R, int V, class T>
static __attribute__((noinline)) void weigh(const float* weights, int64_t weights_stride, const float*,
                                            const Segment<T>* segments, int64_t limit, int64_t column, int64_t size,
                                            int64_t apart, const float* keep, float* out) {
  Vec sum[R][V];
  PENSTOCK_UNROLL
  for (int i = 0; i < R; ++i)
    PENSTOCK_UNROLL
    for (int v = 0; v < V; ++v) sum[i][v] = load(out + i * size + column + v * kLanes) * keep[i];
  for (; segments->offset < limit; ++segments) {
    const T* values = segments->values + column;
    const T* next = segments->next + column;
    const float* weight = weights + segments->offset;
    const int64_t left = limit - segments->offset, count = left < segments->count ? left : segments->count;
    for (int64_t k = 0; k < count; ++k) {
      Vec value[V];
      PENSTOCK_UNROLL
      for (int v = 0; v < V; ++v) {
        if (R <= kFewRows && v * kLanes * sizeof(T) % kLine == 0) __builtin_prefetch(next + k * apart + v * kLanes, 0, 2);
        value[v] = widen(values + k * apart + v * kLanes);
      }
      PENSTOCK_UNROLL
      for (int i = 0; i < R; ++i) {
        const Vec wi = splat(weight[i * weights_stride + k]);
        PENSTOCK_UNROLL
        for (int v = 0; v < V; ++v) multiply_add(sum[i][v], wi, value[v]);
      }
    }
  }
  PENSTOCK_UNROLL
  for (int i = 0; i < R; ++i)
    PENSTOCK_UNROLL
    for (int v = 0; v < V; ++v) store(out + i * size + column + v * kLanes, sum[i][v]);
}

// One element of the output.
template <class T>
PENSTOCK_INLINE float weigh_one(const float* weights, const float*, const Segment<T>* segments, int64_t limit,
                                int64_t column, int64_t, int64_t apart, float before) {
  float sum = before;
  for (const Segment<T>* s = segments; s->offset < limit; ++s)
    for (int64_t k = 0; k < s->count && s->offset + k < limit; ++k)
      sum += weights[s->offset + k] * widen(s->values[k * apart + column]);
  return sum;
}

template <int B, int V, class T>
PENSTOCK_INLINE void score_rows(int64_t rows, const float* x, const float* scale, const KeyBlock<T>* blocks,
                                int64_t column, int64_t block_size, int64_t size, int64_t scores_stride) {
  // Larger numbers of rows do not occur with this many vectors: see blocks_at_once.
  constexpr auto kFits = [](int of) { return B * V <= vectors_at_once<T>(of) ? of : 1; };
  with_constant<kManyRows>(rows, [&](auto r) {
    score<kFits(r), B, V>(x, scale, blocks, column, block_size, size, scores_stride);
  });
}

// Scores of up to blocks_at_once blocks.
template <class T>
PENSTOCK_INLINE void score_blocks(int64_t rows, const float* x, const float* scale, const KeyBlock<T>* blocks,
                                  int num_blocks, int64_t block_size, int64_t size, int64_t scores_stride) {
  int64_t column = 0;
  for (; column + 2 * kLanes <= block_size; column += 2 * kLanes) {
    if (num_blocks == 2)
      score_rows<2, 2>(rows, x, scale, blocks, column, block_size, size, scores_stride);
    else
      score_rows<1, 2>(rows, x, scale, blocks, column, block_size, size, scores_stride);
  }
  for (; column + kLanes <= block_size; column += kLanes) {
    int b = 0;
    for (; b + 4 <= num_blocks; b += 4)
      score_rows<4, 1>(rows, x, scale, blocks + b, column, block_size, size, scores_stride);
    for (; b + 2 <= num_blocks; b += 2)
      score_rows<2, 1>(rows, x, scale, blocks + b, column, block_size, size, scores_stride);
    for (; b < num_blocks; ++b)
      score_rows<1, 1>(rows, x, scale, blocks + b, column, block_size, size, scores_stride);
  }
  for (int b = 0; b < num_blocks; ++b)
    for (int64_t from = column; from < block_size; ++from)
      for (int64_t i = 0; i < rows; ++i)
        blocks[b].scores[i * scores_stride + from] =
            score_one(x + i * size, scale + i, blocks[b], from, block_size, size);
}

// All columns of some rows: four vectors at once if there are enough registers, then two, then one, then single
// elements.
template <class T>
PENSTOCK_INLINE void weigh_rows(int64_t rows, const float* weights, int64_t weights_stride, const float* scale,
                                const Segment<T>* segments, int64_t limit, int64_t size, int64_t apart,
                                const float* keep, float* out) {
  with_constant<kManyRows>(rows, [&](auto r) {
    int64_t column = 0;
    if constexpr (vectors_at_once<T>(r) == 4)
      for (; column + 4 * kLanes <= size; column += 4 * kLanes)
        weigh<r, 4>(weights, weights_stride, scale, segments, limit, column, size, apart, keep, out);
    for (; column + 2 * kLanes <= size; column += 2 * kLanes)
      weigh<r, 2>(weights, weights_stride, scale, segments, limit, column, size, apart, keep, out);
    for (; column + kLanes <= size; column += kLanes)
      weigh<r, 1>(weights, weights_stride, scale, segments, limit, column, size, apart, keep, out);
    for (; column < size; ++column)
      for (int i = 0; i < r; ++i) {
        float* const to = out + i * size + column;
        *to = weigh_one(weights + i * weights_stride, scale + i, segments, limit, column, size, apart, *to * keep[i]);
      }
  });
}

// Online-softmax accumulators of a row: sum of weights times values, sum of weights, and the largest score, to which
// both are relative.
struct Sums {
  float* values;  // [rows][head_size]
  float* mass;    // [rows][kLanes], lane-wise partial sums
  float* peak;    // [rows]
};

// Range of a tile's positions visible to a row.
struct Visible {
  int64_t from, to;
  // Rounded outwards to whole vectors.
  int64_t first() const { return from / kLanes * kLanes; }
  int64_t last() const { return (to + kLanes - 1) / kLanes * kLanes; }
};

// Masks the invisible positions of a row's vectors with -infinity, and returns the largest score.
//
// key_scale: per position, for int8; nullptr otherwise. slope: of ALiBi; 0 for none. biases: of `num_biases` distances;
// nullptr for none. distance: of the query from the first score.
static __attribute__((noinline)) float find_peak(float soft_cap, float* scores, const Visible& visible,
                                                 const float* key_scale, float slope = 0.0f, int64_t distance = 0,
                                                 const float* biases = nullptr, int64_t num_biases = 0) {
  const int64_t first = visible.first(), last = visible.last();
  if (key_scale != nullptr)
    for (int64_t i = first; i < last; i += kLanes) store(scores + i, load(scores + i) * load(key_scale + i));
  if (slope != 0.0f)
    for (int64_t i = first; i < last; i += kLanes) {
      Vec score = load(scores + i), from_query;
      for (int lane = 0; lane < kLanes; ++lane) from_query[lane] = static_cast<float>(i + lane - distance);
      multiply_add(score, from_query, splat(slope));
      store(scores + i, score);
    }
  if (biases != nullptr)
    for (int64_t i = visible.from; i < visible.to; ++i) {
      const int64_t apart = distance - i;
      scores[i] += biases[apart < num_biases ? apart : num_biases - 1] * kLog2e;
    }
  for (int64_t i = first; i < visible.from; ++i) scores[i] = kMinusInfinity;
  for (int64_t i = visible.to; i < last; ++i) scores[i] = kMinusInfinity;
  Vec most = splat(kMinusInfinity);
  if (soft_cap != 0.0f) {
    for (int64_t i = first; i < last; i += kLanes) {
      const Vec s = load(scores + i);
      const IntVec is_hidden = s == kMinusInfinity;
      store(scores + i, is_hidden ? s : soft_cap * tanh(s / soft_cap));
    }
  }
  for (int64_t i = first; i < last; i += kLanes) most = max(load(scores + i), most);
  return max_lanes(most);
}

// Turns a row's scores into softmax weights in place, relative to `peak`, zero where not visible, up to `length`.
// Returns `mass` with the weights added.
//
// put: stores the weights of a vector of positions, not after their scores. scale: changes weights of visible positions.
template <class Put, class Scale>
PENSTOCK_INLINE Vec soften_with(float* scores, const Visible& visible, int64_t length, float peak, Vec mass,
                                const Put& put, const Scale& scale) {
  const int64_t first = visible.first(), last = visible.last();
  for (int64_t i = 0; i < first; i += kLanes) put(i, Vec{});
  for (int64_t i = first; i < last; i += kLanes) {
    const Vec weight = exp2_of_negative(load(scores + i) - peak);
    mass += weight;
    put(i, scale(i, weight));
  }
  for (int64_t i = last; i < length; i += kLanes) put(i, Vec{});
  return mass;
}

// value_scale: per position, for int8; nullptr otherwise.
static __attribute__((noinline)) Vec soften(float* scores, const Visible& visible, int64_t length, float peak,
                                            const float* value_scale, Vec mass) {
  return soften_with(
      scores, visible, length, peak, mass, [&](int64_t i, Vec weight) { store(scores + i, weight); },
      [&](int64_t i, Vec weight) { return value_scale == nullptr ? weight : weight * load(value_scale + i); });
}

// The weights are rounded to pairs.
static __attribute__((noinline)) Vec soften_to_pairs(float* scores, const Visible& visible, int64_t length, float peak,
                                                     Vec mass) {
  return soften_with(
      scores, visible, length, peak, mass, [&](int64_t i, Vec weight) { store_halves(scores, i, weight); },
      [](int64_t, Vec weight) { return weight; });
}

}  // namespace PENSTOCK_NAMESPACE
