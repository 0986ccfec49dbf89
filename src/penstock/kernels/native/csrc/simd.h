// Float vectors as the compiler's vector types: one source for every instruction set.
//
// The including file first switches the compiler to its instruction set and defines PENSTOCK_LANES (floats per vector)
// and PENSTOCK_NAMESPACE. Neither this file nor the kernels use library templates: the linker could merge such code
// with that of another instruction set.

#include <cstdint>
#include <cstring>

namespace PENSTOCK_NAMESPACE {

constexpr int kLanes = PENSTOCK_LANES;

typedef float Vec __attribute__((vector_size(PENSTOCK_LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(PENSTOCK_LANES * 4)));
typedef uint32_t UintVec __attribute__((vector_size(PENSTOCK_LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(PENSTOCK_LANES * 2)));

#define PENSTOCK_INLINE static inline __attribute__((always_inline))

// Unaligned loads and stores. GCC would move the bytes of a memcpy through the stack.
typedef float LooseVec __attribute__((vector_size(PENSTOCK_LANES * 4), aligned(4), may_alias));

PENSTOCK_INLINE Vec load(const float* from) { return *reinterpret_cast<const LooseVec*>(from); }

// 16-bit floats, which widen to float exactly.
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

PENSTOCK_INLINE Vec load(const Float16* from) {
  HalfVec h;
  std::memcpy(&h, from, sizeof h);
#if defined(PENSTOCK_WIDEN_FLOAT16)
  return PENSTOCK_WIDEN_FLOAT16(h);
#else
  const UintVec bits = __builtin_convertvector(h, UintVec);
  const UintVec magnitude = bits & 0x7fff;
  // The exponent's bias is 112 larger: a multiplication adds it, for subnormal values too.
  const UintVec finite = (UintVec)((Vec)(magnitude << 13) * 0x1p112f);
  const UintVec infinite = (magnitude << 13) | 0x7f800000u;
  const UintVec is_infinite = (UintVec)(magnitude > 0x7bff);
  return (Vec)((is_infinite & infinite) | (~is_infinite & finite) | (bits & 0x8000) << 16);
#endif
}

PENSTOCK_INLINE void store(float* to, Vec v) { *reinterpret_cast<LooseVec*>(to) = v; }

// Subtracting zero changes nothing, not even the sign of a zero, so compilers keep only the broadcast.
PENSTOCK_INLINE Vec splat(float x) { return x - Vec{}; }

// If either operand is NaN, the result is the second.
PENSTOCK_INLINE Vec max(Vec a, Vec b) {
#if defined(__x86_64__) && PENSTOCK_LANES == 4
  return _mm_max_ps(a, b);
#elif defined(__x86_64__) && PENSTOCK_LANES == 8
  return _mm256_max_ps(a, b);
#elif defined(__x86_64__) && PENSTOCK_LANES == 16
  return _mm512_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
PENSTOCK_INLINE Vec min(Vec a, Vec b) {
#if defined(__x86_64__) && PENSTOCK_LANES == 4
  return _mm_min_ps(a, b);
#elif defined(__x86_64__) && PENSTOCK_LANES == 8
  return _mm256_min_ps(a, b);
#elif defined(__x86_64__) && PENSTOCK_LANES == 16
  return _mm512_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// sum + x * w, as an FMA (rounded once) where the CPU has one, in the form that accumulates in place. From expressions,
// compilers choose any of the FMA forms, and a loop with as many accumulators as registers ends with moving them about,
// finally through memory: a quarter of the loop's time.
PENSTOCK_INLINE void multiply_add(Vec& sum, Vec x, Vec w) {
#if defined(PENSTOCK_FMA_REGISTER)
  asm("vfmadd231ps %2, %1, %0" : "+" PENSTOCK_FMA_REGISTER(sum) : PENSTOCK_FMA_REGISTER(x), PENSTOCK_FMA_REGISTER(w));
#else
  sum += x * w;
#endif
}

// Sum of the lanes, in a fixed order for bit-exactness.
PENSTOCK_INLINE float sum_lanes(Vec v) {
  typedef float Four __attribute__((vector_size(16)));
  Four parts[kLanes / 4];
  std::memcpy(parts, &v, sizeof v);
  for (int width = kLanes / 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

// Largest lane; no lane may be NaN.
PENSTOCK_INLINE float max_lanes(Vec v) {
  typedef float Four __attribute__((vector_size(16)));
  Four parts[kLanes / 4];
  std::memcpy(parts, &v, sizeof v);
  for (int width = kLanes / 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) parts[i] = parts[i] > parts[i + width] ? parts[i] : parts[i + width];
  const float low = parts[0][0] > parts[0][1] ? parts[0][0] : parts[0][1];
  const float high = parts[0][2] > parts[0][3] ? parts[0][2] : parts[0][3];
  return low > high ? low : high;
}

// e^x by the polynomial of Cephes' expf, about one unit in the last place. 0 below -87.3, also for -infinity; NaN stays
// NaN.
PENSTOCK_INLINE Vec exp(Vec x) {
  const Vec lowest = splat(-87.33654f);
  const IntVec is_zero = x < lowest;
  Vec clamped = min(splat(88.37626f), max(lowest, x));
  // 1.5 * 2^23: adding it rounds to the nearest integer, which is then in the low bits.
  const float magic = 12582912.0f;
  Vec shifted = clamped * 1.44269504f + magic;
  IntVec n = (IntVec)shifted - (IntVec)splat(magic);
  Vec whole = shifted - magic;
  Vec r = clamped - whole * 0.693359375f;
  r = r - whole * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  Vec e = p * (r * r) + r + 1.0f;
  Vec scale = (Vec)((n + 127) << 23);
  IntVec result = (IntVec)(e * scale) & ~is_zero;
  return (Vec)result;
}

// 2^x for x up to 0, within 2e-7 of it, by the minimax polynomial that is 1 at 0. 0 below -126, also for -infinity; NaN
// stays NaN.
PENSTOCK_INLINE Vec exp2_of_negative(Vec x) {
  const IntVec is_zero = x < splat(-126.0f);
  // 1.5 * 2^23: adding it rounds to the nearest integer, which is then in the low bits.
  const float magic = 12582912.0f;
  const Vec shifted = x + magic;
  const Vec r = x - (shifted - magic);
  Vec p = splat(1.3264727197e-3f);
  p = p * r + 9.6715126397e-3f;
  p = p * r + 5.5507337433e-2f;
  p = p * r + 2.4022242085e-1f;
  p = p * r + 6.9314697760e-1f;
  p = p * r + 1.0f;
  const Vec scale = (Vec)(((UintVec)shifted << 23) + 0x3f800000u);
  return (Vec)((IntVec)(p * scale) & ~is_zero);
}

// 1 - 2 / (e^2x + 1).
PENSTOCK_INLINE Vec tanh(Vec x) { return 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f); }

}  // namespace PENSTOCK_NAMESPACE
