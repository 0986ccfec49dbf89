// Paged KV cache: memory layout, writes of a step's keys and values, and element conversion.
//
// A block of one KV head holds its keys as [dimension][position], its values as [position][dimension]. For int8, pairs
// of rows are interleaved, so that the products of two dimensions, or positions, are computed and added at once; an odd
// last row is not interleaved. int8 has one float32 scale per position and head, stored after the block's elements:
// value = element * scale.

namespace PENSTOCK_NAMESPACE {

// Conversion of elements to float.
PENSTOCK_INLINE Vec widen(const float* from) { return load(from); }
PENSTOCK_INLINE Vec widen(const Bfloat16* from) {
#if defined(__GNUC__) && !defined(__clang__) && PENSTOCK_LANES >= 8
  // GCC would widen each half of the vector by itself and join the halves: three instructions more.
  typedef short Halves __attribute__((vector_size(PENSTOCK_LANES * 2)));
  Halves h;
  std::memcpy(&h, from, sizeof h);
#if PENSTOCK_LANES == 8
  return (Vec)((UintVec)__builtin_ia32_pmovzxwd256(h) << 16);
#else
  return (Vec)((UintVec)__builtin_ia32_pmovzxwd512_mask(h, IntVec{}, -1) << 16);
#endif
#else
  HalfVec h;
  std::memcpy(&h, from, sizeof h);
  return (Vec)(__builtin_convertvector(h, UintVec) << 16);
#endif
}

PENSTOCK_INLINE void narrow_one(float x, float, float* to) { *to = x; }
PENSTOCK_INLINE void narrow_one(float x, float inverse_scale, int8_t* to) {
  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even.
  const float magic = 12582912.0f;
  *to = static_cast<int8_t>(static_cast<int32_t>((x * inverse_scale + magic) - magic));
}
PENSTOCK_INLINE void narrow_one(float x, float, Bfloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to->bits = static_cast<uint16_t>(x == x ? rounded : bits >> 16 | 0x40);
}

// Number of the request's first `length` positions whose KV is on this rank (decode context parallel). They keep their
// order; cache positions count these alone.
PENSTOCK_INLINE int64_t kept(const AttentionArgs& a, int64_t length) {
  if (a.num_shares == 1) return length;
  const int64_t round = a.num_shares * a.interleave, rest = length % round - a.share * a.interleave;
  return length / round * a.interleave + (rest < 0 ? 0 : rest < a.interleave ? rest : a.interleave);
}

// Whole-request position of a cache position.
PENSTOCK_INLINE int64_t whole_position(const AttentionArgs& a, int64_t position) {
  if (a.num_shares == 1) return position;
  return (position / a.interleave * a.num_shares + a.share) * a.interleave + position % a.interleave;
}

// Elements of a value.
PENSTOCK_INLINE int64_t value_size(const AttentionArgs& a) { return a.latent_size > 0 ? a.latent_size : a.head_size; }

// Query heads of this rank.
PENSTOCK_INLINE int64_t own_heads(const AttentionArgs& a) { return a.num_heads / a.num_shares; }

template <class T>
PENSTOCK_INLINE T* block_at(const AttentionArgs& a, void* cache, int64_t block, int64_t kv_head) {
  return reinterpret_cast<T*>(static_cast<char*>(cache) + (block * a.num_kv_heads + kv_head) * a.head_stride);
}

// Scales after a block's elements; not necessarily aligned.
PENSTOCK_INLINE char* scales_of(const AttentionArgs& a, int8_t* block) {
  return reinterpret_cast<char*>(block + a.block_size * a.head_size);
}

// The largest magnitude maps to 127, unless it is close to zero. A non-finite element makes the scale NaN.
PENSTOCK_INLINE float int8_scale(const float* x, int64_t size) {
  float most = 0.0f, poison = 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    const float magnitude = __builtin_fabsf(x[i]);
    most = magnitude > most ? magnitude : most;
    poison += x[i] * 0.0f;
  }
  return (most > 1e-30f ? most / 127.0f : 1.0f) + poison;
}

// Offset of an element of an interleaved int8 matrix [rows][columns].
PENSTOCK_INLINE int64_t place_in_pairs(int64_t row, int64_t column, int64_t rows, int64_t columns) {
  return row < rows / 2 * 2 ? row / 2 * 2 * columns + 2 * column + row % 2 : row * columns + column;
}

// Writes the key at position `offset` of a block.
template <class T>
PENSTOCK_INLINE void write_key(const AttentionArgs& a, const float* x, T* block, int64_t offset) {
  for (int64_t d = 0; d < a.head_size; ++d) narrow_one(x[d], 1.0f, block + d * a.block_size + offset);
}

template <class T>
PENSTOCK_INLINE void write_value(const AttentionArgs& a, const float* x, T* block, int64_t offset) {
  for (int64_t d = 0; d < a.head_size; ++d) narrow_one(x[d], 1.0f, block + offset * a.head_size + d);
}

// Writes a vector's scale and returns its inverse; 0 for NaN.
PENSTOCK_INLINE float write_scale(const AttentionArgs& a, const float* x, int8_t* block, int64_t offset) {
  const float scale = int8_scale(x, a.head_size);
  std::memcpy(scales_of(a, block) + offset * sizeof(float), &scale, sizeof scale);
  return scale == scale ? 1.0f / scale : 0.0f;
}

PENSTOCK_INLINE void write_key(const AttentionArgs& a, const float* x, int8_t* block, int64_t offset) {
  const float inverse_scale = write_scale(a, x, block, offset);
  for (int64_t d = 0; d < a.head_size; ++d)
    narrow_one(inverse_scale != 0.0f ? x[d] : 0.0f, inverse_scale,
               block + place_in_pairs(d, offset, a.head_size, a.block_size));
}

PENSTOCK_INLINE void write_value(const AttentionArgs& a, const float* x, int8_t* block, int64_t offset) {
  const float inverse_scale = write_scale(a, x, block, offset);
  int8_t* to = block + place_in_pairs(offset, 0, a.block_size, a.head_size);
  const int64_t step = offset < a.block_size / 2 * 2 ? 2 : 1;
  for (int64_t d = 0; d < a.head_size; ++d)
    narrow_one(inverse_scale != 0.0f ? x[d] : 0.0f, inverse_scale, to + d * step);
}

// Prepares a query or key head: RMS norm and RoPE where configured, in either order, then times `factor`.
PENSTOCK_INLINE void prepare_head(const AttentionArgs& a, const float* x, int64_t head, int64_t token, float factor,
                                  float* out) {
  const int64_t size = a.head_size;
  const float* weight = a.norm_weight == nullptr ? nullptr : a.norm_weight + head * size;
  if (weight != nullptr && !a.norm_is_last)
    normalise(x, weight, out, size, a.norm_eps);
  else
    std::memcpy(out, x, size * sizeof(float));
  if (a.rotary_table != nullptr) turn(out, a.rotary_table + a.positions[token] * 2 * a.rotary_half, a.rotary_half);
  if (weight != nullptr && a.norm_is_last) normalise(out, weight, out, size, a.norm_eps);
  for (int64_t d = 0; d < size; ++d) out[d] *= factor;
}

// Prefetches memory that is read or written soon.
template <bool kIsWritten>
PENSTOCK_INLINE void fetch_soon(const void* memory, int64_t bytes) {
  const char* from = static_cast<const char*>(memory);
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(from + i, kIsWritten, 2);
}

// Writes keys and values of one KV head for the request's positions begin .. end, all tokens of this step. Prefetches
// source and destination of those a block later.
template <class T>
static void write_positions(const AttentionArgs& a, int64_t request, int64_t kv_head, int64_t begin, int64_t end,
                            float* key) {
  const int32_t* blocks = a.block_table + request * a.block_table_stride;
  const int64_t size = a.head_size, length = kept(a, a.seq_lens[request]);
  const int64_t first_token = a.query_start[request + 1] - a.seq_lens[request];  // token of position 0
  for (int64_t position = begin; position < end; ++position) {
    const int64_t token = first_token + whole_position(a, position), offset = position % a.block_size;
    const int64_t number = position / a.block_size, block = blocks[number];
    const float* from_key = a.key + token * a.key_stride + kv_head * size;
    const float* from_value = a.value + token * a.value_stride + kv_head * size;
    if (position + a.block_size < length) {
      const int64_t later = blocks[number + 1], share = size * static_cast<int64_t>(sizeof(T));
      const int64_t tokens = a.block_size * a.num_shares;
      fetch_soon<false>(from_key + tokens * a.key_stride, size * sizeof(float));
      fetch_soon<false>(from_value + tokens * a.value_stride, size * sizeof(float));
      fetch_soon<true>(block_at<T>(a, a.key_cache, later, kv_head) + offset * size, share);
      fetch_soon<true>(block_at<T>(a, a.value_cache, later, kv_head) + offset * size, share);
    }
    prepare_head(a, from_key, own_heads(a) + kv_head, token, 1.0f, key);
    write_key(a, key, block_at<T>(a, a.key_cache, block, kv_head), offset);
    write_value(a, from_value, block_at<T>(a, a.value_cache, block, kv_head), offset);
  }
}

}  // namespace PENSTOCK_NAMESPACE
