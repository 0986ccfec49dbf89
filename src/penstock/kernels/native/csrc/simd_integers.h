// Vectors of small integers, in addition to simd.h: dot products of adjacent elements.
#include <cstdint>
#include <cstring>

namespace PENSTOCK_NAMESPACE {

typedef int16_t ShortVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t UnsignedShortVec __attribute__((vector_size(kLanes * 4)));
typedef int8_t ByteVec __attribute__((vector_size(kLanes * 4)));
typedef int8_t HalfByteVec __attribute__((vector_size(kLanes * 2)));
typedef uint8_t QuarterByteVec __attribute__((vector_size(kLanes)));

template <class V>
PENSTOCK_INLINE V load_bytes(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

PENSTOCK_INLINE void store(int32_t* to, IntVec v) { std::memcpy(to, &v, sizeof v); }

PENSTOCK_INLINE IntVec splat_int(int32_t x) { return x - IntVec{}; }

// Forces the value to be computed here. Compilers would otherwise compute many products before they add the first, and
// spill registers, or contract a multiply-add in one place and not in another, which rounds differently.
#if defined(__x86_64__)
#define PENSTOCK_NEEDED_NOW(vector) asm volatile("" : "+x"(vector))
#elif defined(__aarch64__)
#define PENSTOCK_NEEDED_NOW(vector) asm volatile("" : "+w"(vector))
#else
#define PENSTOCK_NEEDED_NOW(vector)
#endif

// Forces a product to be rounded, before it is added to something.
#if defined(__x86_64__)
#define PENSTOCK_ROUNDED(number) asm volatile("" : "+x"(number))
#elif defined(__aarch64__)
#define PENSTOCK_ROUNDED(number) asm volatile("" : "+w"(number))
#else
#define PENSTOCK_ROUNDED(number)
#endif

PENSTOCK_INLINE ShortVec widen(HalfByteVec x) {
#if defined(__x86_64__) && PENSTOCK_LANES == 8
  return (ShortVec)_mm256_cvtepi8_epi16((__m128i)x);
#elif defined(__x86_64__) && PENSTOCK_LANES == 16
  return (ShortVec)_mm512_cvtepi8_epi16((__m256i)x);
#else
  return __builtin_convertvector(x, ShortVec);
#endif
}

PENSTOCK_INLINE IntVec widen_to_ints(const int8_t* from) {
#if defined(__x86_64__) && PENSTOCK_LANES == 8
  return (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#elif defined(__x86_64__) && PENSTOCK_LANES == 16
  return (IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  IntVec ints;
  for (int i = 0; i < kLanes; ++i) ints[i] = from[i];
  return ints;
#endif
}

PENSTOCK_INLINE IntVec widen(QuarterByteVec x) {
#if defined(__x86_64__) && PENSTOCK_LANES == 8
  long long bytes;
  std::memcpy(&bytes, &x, sizeof bytes);
  return (IntVec)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes));
#elif defined(__x86_64__) && PENSTOCK_LANES == 16
  return (IntVec)_mm512_cvtepu8_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, IntVec);
#endif
}

// To the nearest integer, ties to even; for magnitudes below 2^22.
PENSTOCK_INLINE IntVec round_to_int(Vec x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  return (IntVec)(x + magic) - (IntVec)splat(magic);
}

// Each lane: dot product of two int16 pairs.
PENSTOCK_INLINE IntVec dot_pairs(ShortVec a, ShortVec b) {
#if defined(__x86_64__) && PENSTOCK_LANES == 4
  return (IntVec)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__x86_64__) && PENSTOCK_LANES == 8
  return (IntVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__) && PENSTOCK_LANES == 16
  return (IntVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  return ((IntVec)a << 16 >> 16) * ((IntVec)b << 16 >> 16) + ((IntVec)a >> 16) * ((IntVec)b >> 16);
#endif
}

// Each 16-bit lane: dot product of two unsigned and two signed bytes, which must fit int16.
PENSTOCK_INLINE ShortVec dot_byte_pairs(ByteVec is_unsigned, ByteVec is_signed) {
#if defined(__x86_64__) && PENSTOCK_LANES == 8
  return (ShortVec)_mm256_maddubs_epi16((__m256i)is_unsigned, (__m256i)is_signed);
#elif defined(__x86_64__) && PENSTOCK_LANES == 16
  return (ShortVec)_mm512_maddubs_epi16((__m512i)is_unsigned, (__m512i)is_signed);
#else
  const UnsignedShortVec u = (UnsignedShortVec)is_unsigned;
  const ShortVec s = (ShortVec)is_signed;
  return (ShortVec)(u & 255) * (s << 8 >> 8) + (ShortVec)(u >> 8) * (s >> 8);
#endif
}

// Each lane: sum, plus the dot product of four unsigned and four signed bytes. Without VNNI, the sum of two adjacent
// products must fit int16.
PENSTOCK_INLINE IntVec add_dot_quads(IntVec sum, ByteVec is_unsigned, ByteVec is_signed) {
#if PENSTOCK_DOT_QUADS
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)is_unsigned, (__m512i)is_signed);
#else
  return sum + dot_pairs(dot_byte_pairs(is_unsigned, is_signed), ShortVec{} + 1);
#endif
}

// Each lane: sum, plus the dot product of four signed bytes. x: from -127 to 127.
PENSTOCK_INLINE IntVec add_dot_signed_quads(IntVec sum, ByteVec w, ByteVec x) {
#if defined(__x86_64__) && PENSTOCK_LANES == 8
  // |w| * (x with the sign of w); the sum of two is at most 2 * 128 * 127.
  const ByteVec magnitude = (ByteVec)_mm256_abs_epi8((__m256i)w);
  return add_dot_quads(sum, magnitude, (ByteVec)_mm256_sign_epi8((__m256i)x, (__m256i)w));
#elif defined(__x86_64__) && PENSTOCK_LANES == 16
  const ByteVec magnitude = (ByteVec)_mm512_abs_epi8((__m512i)w);
  const __mmask64 is_negative = _mm512_movepi8_mask((__m512i)w);
  return add_dot_quads(
      sum, magnitude, (ByteVec)_mm512_mask_sub_epi8((__m512i)x, is_negative, _mm512_setzero_si512(), (__m512i)x));
#else
  const ShortVec v = (ShortVec)w, u = (ShortVec)x;
  return sum + dot_pairs(v << 8 >> 8, u << 8 >> 8) + dot_pairs(v >> 8, u >> 8);
#endif
}

// Whether any lane is set, of lanes with all bits or none.
PENSTOCK_INLINE bool any(IntVec lanes) {
#if defined(__x86_64__) && PENSTOCK_LANES == 4
  return _mm_movemask_ps((__m128)lanes) != 0;
#elif defined(__x86_64__) && PENSTOCK_LANES == 8
  return _mm256_movemask_ps((__m256)lanes) != 0;
#elif defined(__x86_64__) && PENSTOCK_LANES == 16
  return _mm512_movepi32_mask((__m512i)lanes) != 0;
#else
  int32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= lanes[i];
  return bits != 0;
#endif
}

// Low and high nibbles of every byte, as bytes.
PENSTOCK_INLINE ByteVec low_halves(ByteVec x) { return x & 15; }
PENSTOCK_INLINE ByteVec high_halves(ByteVec x) { return (ByteVec)((UnsignedShortVec)x >> 4) & 15; }

// Each byte: the table's entry at this index, from 0 to 15.
PENSTOCK_INLINE ByteVec look_up(const int8_t (&table)[16], ByteVec index) {
#if defined(__x86_64__) && PENSTOCK_LANES == 8
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (ByteVec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)index);
#elif defined(__x86_64__) && PENSTOCK_LANES == 16
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (ByteVec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), (__m512i)index);
#else
  ByteVec found;
  for (unsigned i = 0; i < sizeof found; ++i) found[i] = table[static_cast<int>(index[i])];
  return found;
#endif
}

}  // namespace PENSTOCK_NAMESPACE
