// Activation rows quantised to integers from -127 to 127, one scale per group: x is about scale * integer.
//
// A row is quantised by itself, so its integers do not depend on the batch.

namespace PENSTOCK_NAMESPACE {

// Elements of a row that share a scale.
constexpr int64_t kGroup = 32;
constexpr int64_t kGroupUnits = kGroup / 4;

// Tiles of [unit][row], of [group][row] for scales, and of [group][part][row] for offsets; the last tile may have fewer
// rows. A unit is four int8; the last group is padded with zeros. For products by tile registers a group's values are
// [row][unit].
struct QuantizedRows {
  int32_t* values;
  float* scales;
  float* offsets;         // a linear function of the sum of a part's integers: Offset
  int64_t groups, parts;  // groups per row, parts per group: 1 or 2
};

// What products with a format of weights need to know of the sum of some integers: base + factor * sum, where
// `times_scale` multiplies by the scale of their group.
struct Offset {
  float base, factor;
  bool times_scale;

  float of(float sum, float scale) const { return base + factor * (times_scale ? sum * scale : sum); }
};

PENSTOCK_INLINE int64_t num_row_groups(int64_t in_features) { return (in_features + kGroup - 1) / kGroup; }

// Adding it to an integer of magnitude below 2^22 leaves the integer in the low bits: 1.5 * 2^23.
constexpr float kMagic = 12582912.0f;

PENSTOCK_INLINE int32_t largest_int_lane(IntVec v) {
  int32_t lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}

// Stores kLanes elements of a row whose units are `unit_stride` apart. Neighbours are joined by shifts, since compilers turn
// conversions to narrower integers into many scalar instructions.
PENSTOCK_INLINE void store_integers(int32_t* to, int64_t unit_stride, IntVec q) {
  typedef uint64_t PairVec __attribute__((vector_size(kLanes * 4)));
  uint64_t pairs[kLanes / 2];
  const PairVec pair = (PairVec)q;
  const PairVec joined = (pair & 0xff) | ((pair >> 24) & 0xff00);
  std::memcpy(pairs, &joined, sizeof joined);
  for (int i = 0; i < kLanes / 4; ++i) to[i * unit_stride] = static_cast<int32_t>(pairs[2 * i] | pairs[2 * i + 1] << 16);
}

// Elements from k on, zeros beyond the end of the row.
PENSTOCK_INLINE Vec load_padded(const float* x, int64_t size, int64_t k) {
  if (k + kLanes <= size) return load(x + k);
  float rest[kLanes] = {};
  for (int i = 0; k + i < size && i < kLanes; ++i) rest[i] = x[k + i];
  return load(rest);
}

PENSTOCK_INLINE float sum_int_lanes(IntVec v) {
  int32_t lanes[kLanes], sum = 0;
  store(lanes, v);
  for (int i = 0; i < kLanes; ++i) sum += lanes[i];
  return static_cast<float>(sum);
}

// Quantises a row of a tile of `height` rows, to units that are `unit_stride` apart. The scale of a group is NaN if any
// of its elements is not finite.
static void quantize_row(const float* x, int64_t size, int64_t height, int64_t unit_stride, Offset offset,
                         const QuantizedRows& to) {
  constexpr int kVectors = kGroup / kLanes;
  int32_t* values = to.values;
  float *scales = to.scales, *offsets = to.offsets;
  for (int64_t first = 0; first < size; first += kGroup) {
    Vec part[kVectors];
    IntVec most{};  // magnitudes as bits of floats; those of NaN are larger than infinity's
    for (int i = 0; i < kVectors; ++i) {
      part[i] = load_padded(x, size, first + i * kLanes);
      const IntVec magnitude = (IntVec)part[i] & 0x7fffffff;
      most = magnitude > most ? magnitude : most;
    }
    const int32_t bits = largest_int_lane(most);
    float largest, inverse = 0.0f;
    std::memcpy(&largest, &bits, sizeof largest);
    const bool is_finite = bits < 0x7f800000;
    // Below this magnitude the inverse is not finite; such a group counts as zero.
    if (is_finite && largest > 1e-30f) inverse = 127.0f / largest;
    IntVec sum[2]{};
    for (int i = 0; i < kVectors; ++i) {
      // A group that is not finite gets zeros: its other elements would convert to integers that overflow.
      const IntVec q = is_finite ? round_to_int(part[i] * inverse) : IntVec{};
      store_integers(values + i * (kLanes / 4) * unit_stride, unit_stride, q);
      sum[i / (kVectors / 2)] += q;
    }
    *scales = !is_finite ? __builtin_nanf("") : inverse == 0.0f ? 0.0f : largest / 127.0f;
    if (to.parts == 1) {
      *offsets = offset.of(sum_int_lanes(sum[0] + sum[1]), *scales);
    } else {
      offsets[0] = offset.of(sum_int_lanes(sum[0]), *scales);
      offsets[height] = offset.of(sum_int_lanes(sum[1]), *scales);
    }
    values += kGroupUnits * height;
    scales += height;
    offsets += to.parts * height;
  }
}

}  // namespace PENSTOCK_NAMESPACE
