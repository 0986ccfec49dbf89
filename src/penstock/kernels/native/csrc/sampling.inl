// Sampling by Gumbel-max: the argmax of logit plus Gumbel noise, which is keyed by token.
#include <cfloat>
#include <cmath>

namespace PENSTOCK_NAMESPACE {

// Tokens per group: their random words come from a quarter as many counters, as in kernels/random.py.
constexpr int kDrawGroup = 64;
constexpr int kDrawCounters = kDrawGroup / 4;
constexpr int kDrawRuns = kDrawCounters / kLanes;

// High and low words of the lane-wise products.
PENSTOCK_INLINE void times(UintVec x, uint32_t multiplier, UintVec& high, UintVec& low) {
  typedef uint64_t Wide __attribute__((vector_size(kLanes * 4)));
  const Wide of_high = (Wide{} + 0xffffffffu) << 32;
#if defined(__x86_64__) && PENSTOCK_LANES == 8
  const __m256i m = _mm256_set1_epi64x(multiplier);
  const Wide even = (Wide)_mm256_mul_epu32((__m256i)x, m), odd = (Wide)_mm256_mul_epu32((__m256i)((Wide)x >> 32), m);
#elif defined(__x86_64__) && PENSTOCK_LANES == 16
  const __m512i m = _mm512_set1_epi64(multiplier);
  const Wide even = (Wide)_mm512_mul_epu32((__m512i)x, m), odd = (Wide)_mm512_mul_epu32((__m512i)((Wide)x >> 32), m);
#else
  const Wide even = ((Wide)x & 0xffffffffu) * multiplier, odd = ((Wide)x >> 32) * multiplier;
#endif
  high = (UintVec)((even >> 32) | (odd & of_high));
  low = (UintVec)((even & ~of_high) | (odd << 32));
}

// Philox4x32-10, keyed by the seed: word w of counter c is for token 16 * w + c of the group.
PENSTOCK_INLINE void draw_bits(int64_t seed, int64_t position, int64_t group, uint32_t* bits) {
  for (int run = 0; run < kDrawRuns; ++run) {
    UintVec x0, x1 = UintVec{} + static_cast<uint32_t>(position), x2 = UintVec{} + static_cast<uint32_t>(position >> 32);
    UintVec x3 = {};
    for (int lane = 0; lane < kLanes; ++lane)
      x0[lane] = static_cast<uint32_t>(group * kDrawCounters + run * kLanes + lane);
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      UintVec high0, low0, high1, low1;
      times(x0, 0xD2511F53u, high0, low0);
      times(x2, 0xCD9E8D57u, high1, low1);
      x0 = high1 ^ x1 ^ key0;
      x1 = low1;
      x2 = high0 ^ x3 ^ key1;
      x3 = low0;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    const UintVec words[4] = {x0, x1, x2, x3};
    for (int word = 0; word < 4; ++word)
      std::memcpy(bits + word * kDrawCounters + run * kLanes, &words[word], sizeof(UintVec));
  }
}

// Logit plus Gumbel noise, in double precision, so that the same token wins on every instruction set.
PENSTOCK_INLINE double with_noise(float x, uint32_t bits) {
  return static_cast<double>(x) - ::log(-::log1p((static_cast<double>(bits) + 0.5) * -0x1p-32));
}

// Upper bound of the noise.
constexpr float kMostNoise = 22.9f;

// Upper bound of `with_noise`, up to rounding error. An exponential variate is at least the uniform u that it is made
// of, and log2(u) at least the bits of u as a float, read as a fixed-point number: a chord of the logarithm.
PENSTOCK_INLINE Vec most_with_noise(Vec x, UintVec bits) {
  const IntVec u = (IntVec)__builtin_convertvector((IntVec)(bits >> 8), Vec);
  const Vec chord = __builtin_convertvector(u, Vec) * 0x1p-23f - (127.0f + 24.0f);
  return x - chord * 0.69314718f;
}

// Gumbel-max over one group; `least` is the value a token must reach to win, with a margin for rounding.
PENSTOCK_INLINE void race(const float* x, int64_t seed, int64_t position, int64_t group, double* best, int64_t* index,
                          float* least) {
  Vec largest = load(x);
  for (int i = kLanes; i < kDrawGroup; i += kLanes) largest = max(largest, load(x + i));
  if (max_lanes(largest) + kMostNoise < *least) return;
  uint32_t bits[kDrawGroup];
  draw_bits(seed, position, group, bits);
  float most[kDrawGroup];
  for (int i = 0; i < kDrawGroup; i += kLanes) {
    UintVec b;
    std::memcpy(&b, bits + i, sizeof b);
    const Vec m = most_with_noise(load(x + i), b);
    store(most + i, m);
    largest = i == 0 ? m : max(largest, m);
  }
  if (max_lanes(largest) < *least) return;
  for (int i = 0; i < kDrawGroup; ++i) {
    if (!(most[i] >= *least)) continue;
    const double sum = with_noise(x[i], bits[i]);
    if (sum > *best) {
      *best = sum;
      *index = group * kDrawGroup + i;
      const float of_best = static_cast<float>(sum);
      *least = of_best - 1e-3f - 1e-6f * (of_best < 0.0f ? -of_best : of_best);
    }
  }
}

static void draw_thread(void* data, int thread, const Team& team) {
  const auto& a = *static_cast<const DrawArgs*>(data);
  const int64_t begin = a.rows * thread / team.num_threads, end = a.rows * (thread + 1) / team.num_threads;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = a.x + row * a.size;
    float most = -__builtin_inff();
    bool has_nan = false;
    scan(x, a.size, &most, &has_nan);
    a.failed[row] = has_nan || !__builtin_isfinite(most);
    a.index[row] = 0;
    if (a.failed[row]) continue;
    const int64_t seed = a.seeds[a.slots[row]], position = a.positions[row], whole = a.size / kDrawGroup;
    double best = -__builtin_inf();
    // Minus infinity never reaches it.
    float least = -FLT_MAX;
    for (int64_t group = 0; group < whole; ++group)
      race(x + group * kDrawGroup, seed, position, group, &best, &a.index[row], &least);
    if (whole * kDrawGroup < a.size) {
      float rest[kDrawGroup];
      for (int64_t i = 0; i < kDrawGroup; ++i)
        rest[i] = whole * kDrawGroup + i < a.size ? x[whole * kDrawGroup + i] : -__builtin_inff();
      race(rest, seed, position, whole, &best, &a.index[row], &least);
    }
  }
}

static void draw(const DrawArgs& a) {
  DrawArgs args = a;
  run_parallel(threads_for(a.rows * a.size, a.rows, a.num_threads), draw_thread, &args);
}

}  // namespace PENSTOCK_NAMESPACE
