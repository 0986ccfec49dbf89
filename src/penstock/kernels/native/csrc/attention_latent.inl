// Latent attention (MLA): the cache has one vector per position, whose end is the position's value.
//
// A block holds its positions as [position][dimension], so that memory is read once for keys and values. A score is a
// sum of products lane by lane, of dimensions a vector apart, and of the lanes in a fixed order: the same bits whatever
// the shape of the register tile.

namespace PENSTOCK_NAMESPACE {

// An element of such a cache.
template <class T>
struct Latent {
  T element;
};

template <class T>
PENSTOCK_INLINE Vec widen(const Latent<T>* from) {
  return widen(reinterpret_cast<const T*>(from));
}
PENSTOCK_INLINE float widen(Latent<float> x) { return x.element; }
PENSTOCK_INLINE float widen(Latent<Bfloat16> x) { return widen(x.element); }

template <class T>
PENSTOCK_INLINE void write_key(const AttentionArgs& a, const float* x, Latent<T>* block, int64_t offset) {
  T* to = reinterpret_cast<T*>(block + offset * a.head_size);
  for (int64_t d = 0; d < a.head_size; ++d) narrow_one(x[d], 1.0f, to + d);
}

// The value is the end of the key.
template <class T>
PENSTOCK_INLINE void write_value(const AttentionArgs&, const float*, Latent<T>*, int64_t) {}

// Positions of a register tile: with its rows, accumulators for as many as there are registers.
constexpr int latents_at_once(int rows) { return kHasManyRegisters || rows <= 2 ? 4 : 2; }

// Scores of R rows with P positions: scores[i][.] = sum over d of x[i][d] * keys[.][d].
template <int R, int P, class T>
static __attribute__((noinline)) void score_latents(const float* x, const Latent<T>* keys, const Latent<T>* next,
                                                    int64_t size, float* scores, int64_t scores_stride) {
  Vec sum[R][P] = {};
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) {
    Vec key[P];
    PENSTOCK_UNROLL
    for (int p = 0; p < P; ++p) {
      if (R <= kFewRows) __builtin_prefetch(next + p * size + d, 0, 2);
      key[p] = widen(keys + p * size + d);
    }
    PENSTOCK_UNROLL
    for (int i = 0; i < R; ++i) {
      const Vec xi = load(x + i * size + d);
      PENSTOCK_UNROLL
      for (int p = 0; p < P; ++p) multiply_add(sum[i][p], xi, key[p]);
    }
  }
  PENSTOCK_UNROLL
  for (int i = 0; i < R; ++i)
    PENSTOCK_UNROLL
    for (int p = 0; p < P; ++p) {
      float all = sum_lanes(sum[i][p]);
      for (int64_t e = d; e < size; ++e) all += x[i * size + e] * widen(keys[p * size + e]);
      scores[i * scores_stride + p] = all;
    }
}

// Scores of all positions of some blocks.
template <class T>
PENSTOCK_INLINE void score_blocks(int64_t rows, const float* x, const float*, const KeyBlock<Latent<T>>* blocks,
                                  int num_blocks, int64_t block_size, int64_t size, int64_t scores_stride) {
  with_constant<kManyRows>(rows, [&](auto r) {
    constexpr int kAtOnce = latents_at_once(r);
    for (int b = 0; b < num_blocks; ++b) {
      const KeyBlock<Latent<T>>& block = blocks[b];
      int64_t p = 0;
      for (; p + kAtOnce <= block_size; p += kAtOnce)
        score_latents<r, kAtOnce>(x, block.keys + p * size, block.next + p * size, size, block.scores + p,
                                  scores_stride);
      for (; p < block_size; ++p)
        score_latents<r, 1>(x, block.keys + p * size, block.next + p * size, size, block.scores + p, scores_stride);
    }
  });
}

}  // namespace PENSTOCK_NAMESPACE
