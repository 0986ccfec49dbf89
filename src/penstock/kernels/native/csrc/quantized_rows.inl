// Activation rows quantised to integers from -127 to 127, one scale per row: x is about scale * integer.
//
// A row is quantised by itself, so its integers do not depend on the batch.

namespace PENSTOCK_NAMESPACE {

// Layout of a row's integers in 32-bit units: two int16, four int8, or four bytes offset by 128.
enum class Form { kShort, kByte, kOffsetByte };

constexpr int unit_size(Form form) { return form == Form::kShort ? 2 : 4; }

// Tiles of [unit][row], the last tile with fewer rows, zero-padded to a multiple of kPadding elements.
struct QuantizedRows {
  Form form;
  int32_t* values;
  int64_t units;  // per row
  float* scales;
  // For int4 weights, the sum of the integers of every group: [rows][groups].
  int32_t* group_sums;
};

constexpr int64_t kPadding = 32;

PENSTOCK_INLINE int64_t padded(int64_t in_features) { return (in_features + kPadding - 1) / kPadding * kPadding; }

// The largest magnitude in a row, as bits of a float; the bits of NaN are larger than infinity's.
static int32_t largest_magnitude(const float* x, int64_t size) {
  IntVec most{};
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) {
    const IntVec bits = (IntVec)load(x + k) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t lanes[kLanes], largest = 0;
  store(lanes, most);
  for (int i = 0; i < kLanes; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  for (; k < size; ++k) {
    int32_t bits;
    std::memcpy(&bits, x + k, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Stores elements k .. k + kLanes of a row whose units are `height` apart. Neighbours are joined by shifts, since
// compilers turn conversions to narrower integers into many scalar instructions.
template <Form form>
PENSTOCK_INLINE void store_integers(int32_t* row, int64_t height, int64_t k, IntVec q) {
  typedef uint64_t PairVec __attribute__((vector_size(kLanes * 4)));
  int32_t* to = row + k / unit_size(form) * height;
  uint64_t pairs[kLanes / 2];
  if (form == Form::kShort) {
    const PairVec pair = (PairVec)q;
    const PairVec joined = (pair & 0xffff) | ((pair >> 16) & 0xffff0000);
    std::memcpy(pairs, &joined, sizeof joined);
    for (int i = 0; i < kLanes / 2; ++i) to[i * height] = static_cast<int32_t>(pairs[i]);
  } else {
    const PairVec pair = (PairVec)(form == Form::kOffsetByte ? q + 128 : q);
    const PairVec joined = (pair & 0xff) | ((pair >> 24) & 0xff00);
    std::memcpy(pairs, &joined, sizeof joined);
    for (int i = 0; i < kLanes / 4; ++i)
      to[i * height] = static_cast<int32_t>(pairs[2 * i] | pairs[2 * i + 1] << 16);
  }
}

// Elements from k on, zeros beyond the end of the row.
PENSTOCK_INLINE Vec load_padded(const float* x, int64_t size, int64_t k) {
  if (k + kLanes <= size) return load(x + k);
  float rest[kLanes] = {};
  for (int i = 0; k + i < size && i < kLanes; ++i) rest[i] = x[k + i];
  return load(rest);
}

PENSTOCK_INLINE int32_t sum_int_lanes(IntVec v) {
  int32_t lanes[kLanes], sum = 0;
  store(lanes, v);
  for (int i = 0; i < kLanes; ++i) sum += lanes[i];
  return sum;
}

// Quantises a row. group_sums: one sum for every `group_size` elements. Returns the row's scale: NaN if any element is
// not finite.
template <Form form>
static float quantize_row(const float* x, int64_t size, int32_t* row, int64_t height, int64_t group_size,
                          int32_t* group_sums) {
  const int32_t bits = largest_magnitude(x, size);
  float largest, inverse = 0.0f;
  std::memcpy(&largest, &bits, sizeof largest);
  const bool is_finite = bits < 0x7f800000;
  // Below this magnitude the inverse is not finite; such a row counts as zero.
  if (is_finite && largest > 1e-30f) inverse = 127.0f / largest;
  const Vec factor = splat(inverse);
  // A non-finite row gets zeros: its other elements would convert to integers so large that their sums overflow.
  const int64_t given = is_finite ? size : 0;
  const int64_t end = padded(size);
  for (int64_t first = 0; first < end; first += group_size) {
    IntVec sum{};
    for (int64_t k = first; k < end && k < first + group_size; k += kLanes) {
      const IntVec q = round_to_int(load_padded(x, given, k) * factor);
      store_integers<form>(row, height, k, q);
      sum += q;
    }
    if (group_sums != nullptr) *group_sums++ = sum_int_lanes(sum);
  }
  return !is_finite ? __builtin_nanf("") : inverse == 0.0f ? 0.0f : largest / 127.0f;
}

}  // namespace PENSTOCK_NAMESPACE
