// Token bitmask: one pass over the words, which reads and writes logits only where a word forbids a token.

namespace PENSTOCK_NAMESPACE {

constexpr int64_t kWordBits = 32;

PENSTOCK_INLINE UintVec bit_of_each_lane() {
  UintVec bits;
  for (int lane = 0; lane < kLanes; ++lane) bits[lane] = 1u << lane;
  return bits;
}

// Masks the logits of one word's tokens, `count` of them; 32 except at a row's end.
PENSTOCK_INLINE void allow_word(float* x, uint32_t word, int64_t count, UintVec bits) {
  if (word == ~0u) return;
  const Vec forbidden = splat(-__builtin_inff());
  if (count < kWordBits) {
    for (int64_t i = 0; i < count; ++i)
      if ((word >> i & 1) == 0) x[i] = forbidden[0];
    return;
  }
  if (word == 0) {
    for (int64_t i = 0; i < kWordBits; i += kLanes) store(x + i, forbidden);
    return;
  }
  for (int64_t i = 0; i < kWordBits; i += kLanes) {
    const IntVec is_allowed = ((UintVec{} + (word >> i)) & bits) != 0;
    store(x + i, is_allowed ? load(x + i) : forbidden);
  }
}

static void allow_by_bits_thread(void* data, int thread, const Team& team) {
  const auto& a = *static_cast<const AllowArgs*>(data);
  const int64_t total = a.num_rows * a.num_words;
  const UintVec bits = bit_of_each_lane();
  const int64_t end = total * (thread + 1) / team.num_threads;
  for (int64_t at = total * thread / team.num_threads; at < end;) {
    const int64_t number = at / a.num_words, stop = least((number + 1) * a.num_words, end);
    float* x = a.x + (a.rows == nullptr ? number : a.rows[number]) * a.size;
    for (; at < stop; ++at) {
      const int64_t token = (at - number * a.num_words) * kWordBits;
      allow_word(x + token, static_cast<uint32_t>(a.words[at]), least(kWordBits, a.size - token), bits);
    }
  }
}

static void allow_by_bits(const AllowArgs& a) {
  AllowArgs args = a;
  const int64_t total = a.num_rows * a.num_words;
  run_parallel(threads_for(total * kWordBits, total, a.num_threads), allow_by_bits_thread, &args);
}

}  // namespace PENSTOCK_NAMESPACE
