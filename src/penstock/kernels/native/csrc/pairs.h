// Products of bfloat16 pairs, added in float32: the arithmetic of AVX512-BF16's vdpbf16ps.
//
// A lane adds the product of the pair's second elements, then that of the first ones, each as an FMA that rounds to
// nearest even. Denormal numbers count as zero, in operands, sums and results. Instruction sets without the instruction
// compute the same bits from float operations; without an FMA, products below the smallest normal number may differ.

namespace PENSTOCK_NAMESPACE {

// Two adjacent elements of a row.
struct Bfloat16Pair {
  uint16_t first, second;
};

PENSTOCK_INLINE Vec load(const Bfloat16Pair* from) {
  return *reinterpret_cast<const LooseVec*>(from);
}

PENSTOCK_INLINE Vec without_denormals(Vec v) {
  const IntVec is_normal = (IntVec)((UintVec)v & 0x7fffffffu) >= 0x00800000;
  return (Vec)((IntVec)v & (is_normal | (int32_t)0x80000000));
}

// First and second elements of pairs.
PENSTOCK_INLINE Vec first_of(Vec pairs) { return without_denormals((Vec)((UintVec)pairs << 16)); }
PENSTOCK_INLINE Vec second_of(Vec pairs) { return without_denormals((Vec)((UintVec)pairs & 0xffff0000u)); }

#if defined(PENSTOCK_PAIR_PRODUCTS)
constexpr bool kHasPairProducts = true;

// sum + x * w, lanes of pairs.
PENSTOCK_INLINE void multiply_add_pairs(Vec& sum, Vec x, Vec w) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
}
#else
constexpr bool kHasPairProducts = false;

PENSTOCK_INLINE void multiply_add_pairs(Vec& sum, Vec x, Vec w) {
  sum = without_denormals(sum);
  multiply_add(sum, second_of(x), second_of(w));
  sum = without_denormals(sum);
  multiply_add(sum, first_of(x), first_of(w));
  sum = without_denormals(sum);
}
#endif

// A pair in every lane.
PENSTOCK_INLINE Vec splat_pair(const float* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return (Vec)(bits - IntVec{});
}

// bfloat16 nearest to each element, ties to even, in the upper half of its lane; NaN stays NaN.
PENSTOCK_INLINE UintVec round_to_bfloat16(Vec v) {
  const UintVec bits = (UintVec)v;
  const UintVec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const UintVec is_nan = (UintVec)(v != v);
  return ((is_nan & (bits | 0x00400000u)) | (~is_nan & rounded)) & 0xffff0000u;
}

// Elements of pairs: those of a vector, rounded. Denormal numbers are zero.
PENSTOCK_INLINE HalfVec halves_of(Vec v) {
#if defined(PENSTOCK_PAIR_PRODUCTS)
  HalfVec halves;
  asm("vcvtneps2bf16 %1, %0" : "=v"(halves) : "v"(v));
  return halves;
#else
  return __builtin_convertvector(round_to_bfloat16(without_denormals(v)) >> 16, HalfVec);
#endif
}

PENSTOCK_INLINE void store_halves(float* row, int64_t k, Vec v) {
  const HalfVec halves = halves_of(v);
  std::memcpy(reinterpret_cast<uint16_t*>(row) + k, &halves, sizeof halves);
}

// Rounds a row of 2 * num_pairs elements; the pairs may take the place of the first ones.
[[maybe_unused]] static void round_row(const float* x, int64_t num_pairs, Bfloat16Pair* to) {
  const int64_t size = 2 * num_pairs;
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) store_halves(reinterpret_cast<float*>(to), k, load(x + k));
  for (; k < size; k += 2) {
    Vec both{};
    both[0] = x[k];
    both[1] = x[k + 1];
    const HalfVec halves = halves_of(both);
    const Bfloat16Pair pair{halves[0], halves[1]};
    std::memcpy(to + k / 2, &pair, sizeof pair);
  }
}

}  // namespace PENSTOCK_NAMESPACE
