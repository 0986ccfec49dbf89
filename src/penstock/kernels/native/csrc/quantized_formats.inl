// Formats of packed weights: integers of 8 and 4 bits, and floats of 4 bits.
//
// A panel is some outputs: for every scale group a head, and its runs of kGroup inner elements. A head has the scales of
// the panel's outputs, and then their minimums. Groups of half a run are two to a scale group, whose head has two parts.

namespace PENSTOCK_NAMESPACE {

constexpr int kPanelVectors = 2;
constexpr int kPanel = kPanelVectors * kLanes;

// A run is [unit][output][4 bytes]. VNNI has products of unsigned and signed bytes: weights that may be negative are
// offset by 128.
template <bool kWithMinimums>
struct ByteFormat {
  static constexpr int64_t kRunBytes = kGroup * kPanel;
  static constexpr bool kHasMinimums = kWithMinimums, kHasParts = true;
  static constexpr bool kIsUnsigned = PENSTOCK_DOT_QUADS || kWithMinimums;
  static constexpr int kStored = PENSTOCK_DOT_QUADS && !kWithMinimums ? 128 : 0;

  struct Place {
    int64_t byte;
  };
  PENSTOCK_INLINE Place place(int64_t n, int64_t inside) { return {(inside / 4 * kPanel + n) * 4 + inside % 4}; }
  PENSTOCK_INLINE int read(const uint8_t* run, Place place) {
    return static_cast<int8_t>(static_cast<uint8_t>(run[place.byte] - kStored));
  }
  PENSTOCK_INLINE void write(uint8_t* run, Place place, int value) {
    run[place.byte] = static_cast<uint8_t>(value + kStored);
  }

  // sum += x * weight, of some units of a run and R rows.
  template <int R, int kFirst, int kUnits>
  PENSTOCK_INLINE void multiply(const int32_t* x, const uint8_t* run, IntVec (&sum)[R][kPanelVectors]) {
#pragma GCC unroll 8
    for (int unit = kFirst; unit < kFirst + kUnits; ++unit) {
      ByteVec w[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v)
        w[v] = load_bytes<ByteVec>(run + (unit * kPanelVectors + v) * sizeof(ByteVec));
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        const ByteVec xi = (ByteVec)splat_int(x[unit * R + i]);
        for (int v = 0; v < kPanelVectors; ++v) {
          sum[i][v] = kIsUnsigned ? add_dot_quads(sum[i][v], w[v], xi) : add_dot_signed_quads(sum[i][v], w[v], xi);
          PENSTOCK_NEEDED_NOW(sum[i][v]);
        }
      }
    }
  }
};

// Values of codes of 4 bits: 0 to 15.
struct IntegerCodes {
  static constexpr bool kHasMinimums = true;
  static constexpr int kStored = 0, kLargest = 15;

  PENSTOCK_INLINE int value(int code) { return code; }
  PENSTOCK_INLINE int code(int value) { return value; }
  PENSTOCK_INLINE ByteVec stored(ByteVec codes) { return codes; }
};

// Codes of E2M1: a sign, two bits of exponent, one of mantissa. Values are twice the numbers, and unsigned with an offset.
struct E2m1Codes {
  static constexpr bool kHasMinimums = false;
  static constexpr int kStored = 12, kLargest = 24;
  static constexpr int8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  static constexpr int8_t kCodes[kLargest + 1] = {15, 0, 0, 0, 14, 0, 13, 0, 12, 11, 10, 9, 0,
                                                  1,  2, 3, 4, 0,  5, 0,  6, 0,  0,  0,  7};

  PENSTOCK_INLINE int value(int code) { return kTable[code] - kStored; }
  PENSTOCK_INLINE int code(int value) { return kCodes[value + kStored]; }
  PENSTOCK_INLINE ByteVec stored(ByteVec codes) { return look_up(kTable, codes); }
};

// A run is [two units][output][4 bytes]: low nibbles are the first unit, high nibbles the other. Products of unsigned
// bytes up to kLargest and signed ones are small enough that vpmaddubsw cannot saturate, nor the sum of some of its
// results.
template <class Codes>
struct NibbleFormat {
  static constexpr int64_t kRunBytes = kGroup * kPanel / 2;
  static constexpr bool kHasMinimums = Codes::kHasMinimums, kHasParts = false, kIsUnsigned = true;
  static constexpr int kStored = Codes::kStored;
  // Pairs of units whose products are added in 16 bits.
  static constexpr int kPairsAtOnce = kGroupUnits / 2 / (Codes::kLargest > 16 ? 2 : 1);

  struct Place {
    int64_t byte;
    int shift;
  };
  PENSTOCK_INLINE Place place(int64_t n, int64_t inside) {
    return {(inside / 8 * kPanel + n) * 4 + inside % 4, inside % 8 < 4 ? 0 : 4};
  }
  // Bytes to multiply with, of codes of 4 bits.
  PENSTOCK_INLINE ByteVec bytes(ByteVec codes) { return Codes::stored(codes); }
  PENSTOCK_INLINE int read(const uint8_t* run, Place place) { return Codes::value(run[place.byte] >> place.shift & 15); }
  PENSTOCK_INLINE void write(uint8_t* run, Place place, int value) {
    run[place.byte] |= static_cast<uint8_t>(Codes::code(value) << place.shift);
  }

  template <int R, int kFirst, int kUnits>
  PENSTOCK_INLINE void multiply(const int32_t* x, const uint8_t* run, IntVec (&sum)[R][kPanelVectors]) {
    static_assert(kFirst == 0 && kUnits == kGroupUnits);
#pragma GCC unroll 2
    for (int pair = 0; pair < kGroupUnits / 2; pair += kPairsAtOnce) multiply_pairs(x, run, pair, sum);
  }

 private:
  template <int R>
  PENSTOCK_INLINE void multiply_pairs(const int32_t* x, const uint8_t* run, int first_pair,
                                      IntVec (&sum)[R][kPanelVectors]) {
#if !PENSTOCK_DOT_QUADS
    static_assert(kPairsAtOnce * 2 * 2 * Codes::kLargest * 127 < 1 << 15);
    ShortVec shorts[R][kPanelVectors]{};
#endif
#pragma GCC unroll 4
    for (int k = first_pair; k < first_pair + kPairsAtOnce; ++k) {
      ByteVec low[kPanelVectors], high[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) {
        const ByteVec both = load_bytes<ByteVec>(run + (k * kPanelVectors + v) * sizeof(ByteVec));
        low[v] = Codes::stored(low_halves(both));
        high[v] = Codes::stored(high_halves(both));
      }
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        const ByteVec first = (ByteVec)splat_int(x[2 * k * R + i]);
        const ByteVec second = (ByteVec)splat_int(x[(2 * k + 1) * R + i]);
        for (int v = 0; v < kPanelVectors; ++v) {
#if PENSTOCK_DOT_QUADS
          sum[i][v] = add_dot_quads(add_dot_quads(sum[i][v], low[v], first), high[v], second);
#else
          shorts[i][v] += dot_byte_pairs(low[v], first);
          PENSTOCK_NEEDED_NOW(shorts[i][v]);
          shorts[i][v] += dot_byte_pairs(high[v], second);
          PENSTOCK_NEEDED_NOW(shorts[i][v]);
#endif
        }
      }
    }
#if !PENSTOCK_DOT_QUADS
    const ShortVec ones = ShortVec{} + 1;
    for (int i = 0; i < R; ++i)
      for (int v = 0; v < kPanelVectors; ++v) sum[i][v] += dot_pairs(shorts[i][v], ones);
#endif
  }
};

using Int4Format = NibbleFormat<IntegerCodes>;
using E2m1Format = NibbleFormat<E2m1Codes>;

// Calls run(format) with the format of a weight.
template <class Function>
PENSTOCK_INLINE void with_format(const QuantizedShape& s, const Function& run) {
  if (s.bits == 4) return s.has_minimums ? run(Int4Format{}) : run(E2m1Format{});
  s.has_minimums ? run(ByteFormat<true>{}) : run(ByteFormat<false>{});
}

// Integer sums start at kMagic, so that as floats they are kMagic more: the offset of rows takes it off, with what the
// offset of stored weights adds; with minimums it is what they are multiplied by.
PENSTOCK_INLINE Offset row_offset(const QuantizedShape& s) {
  if (s.has_minimums) return {0.0f, 1.0f, true};
  return {kMagic, static_cast<float>(s.bits == 4 ? E2m1Format::kStored : ByteFormat<false>::kStored), false};
}

PENSTOCK_INLINE int64_t num_groups(const QuantizedShape& s) { return divided_up(s.in_features, s.group_size); }
// Groups in a run, at most two.
PENSTOCK_INLINE int64_t parts_per_group(const QuantizedShape& s) { return s.group_size < kGroup ? 2 : 1; }
PENSTOCK_INLINE int64_t runs_per_head(const QuantizedShape& s) { return divided_up(s.group_size, kGroup); }
PENSTOCK_INLINE int64_t num_heads(const QuantizedShape& s) {
  return divided_up(num_row_groups(s.in_features), runs_per_head(s));
}
PENSTOCK_INLINE int64_t part_bytes(const QuantizedShape& s) { return kPanel * s.scale_bytes * (s.has_minimums ? 2 : 1); }
PENSTOCK_INLINE int64_t head_bytes(const QuantizedShape& s) { return parts_per_group(s) * part_bytes(s); }
PENSTOCK_INLINE int64_t run_bytes(const QuantizedShape& s) {
  return s.bits == 8 ? ByteFormat<false>::kRunBytes : Int4Format::kRunBytes;
}
PENSTOCK_INLINE int64_t group_bytes(const QuantizedShape& s) { return head_bytes(s) + runs_per_head(s) * run_bytes(s); }
PENSTOCK_INLINE int64_t panel_bytes(const QuantizedShape& s) {
  const int64_t bytes = num_heads(s) * head_bytes(s) + num_row_groups(s.in_features) * run_bytes(s);
  // An odd number of cache lines: panels that are read at once would otherwise lie multiples of 4 KiB apart, which
  // compete for the same sets of the caches.
  return (divided_up(bytes, kCacheLine) | 1) * kCacheLine;
}
PENSTOCK_INLINE int64_t num_panels(const QuantizedShape& s) { return divided_up(s.out_features, kPanel); }

// A scale or minimum that is stored in 1, 2 or 4 bytes; 2 take float16 values only, 1 the exponent of a power of two.
static void write_scale(uint8_t* to, float value, int num_bytes) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (num_bytes == 4) {
    std::memcpy(to, &bits, sizeof bits);
    return;
  }
  if (num_bytes == 1) {
    *to = static_cast<uint8_t>(bits >> 23);
    return;
  }
  // The exponent's bias is 112 smaller: a multiplication takes it off, for subnormal values too.
  const float magnitude = (value < 0 ? -value : value) * 0x1p-112f;
  uint32_t narrow;
  std::memcpy(&narrow, &magnitude, sizeof narrow);
  const uint16_t half = static_cast<uint16_t>(bits >> 16 & 0x8000) | static_cast<uint16_t>(narrow >> 13 & 0x7fff);
  std::memcpy(to, &half, sizeof half);
}

static float read_scale(const uint8_t* from, int num_bytes) {
  float value;
  if (num_bytes == 4) {
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  if (num_bytes == 1) {
    const uint32_t bits = static_cast<uint32_t>(*from) << 23;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, from, sizeof half);
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  std::memcpy(&value, &magnitude, sizeof value);
  value *= 0x1p112f;
  return half & 0x8000 ? -value : value;
}

// Scales or minimums of a panel's vector.
PENSTOCK_INLINE Vec load_scales(const uint8_t* from, int num_bytes) {
  if (num_bytes == 2) return load(reinterpret_cast<const Float16*>(from));
  if (num_bytes == 4) return load_bytes<Vec>(from);
  return (Vec)(widen(load_bytes<QuarterByteVec>(from)) << 23);
}

// Addresses of an output: of its scales and minimums by group, and of its runs.
template <class Byte>
struct Output {
  const QuantizedShape& shape;
  Byte* panel;
  int64_t column;

  Output(const QuantizedShape& s, Byte* packed, int64_t n)
      : shape(s), panel(packed + n / kPanel * panel_bytes(s)), column(n % kPanel) {}

  Byte* scale(int64_t g) const {
    const int64_t parts = parts_per_group(shape);
    return panel + g / parts * group_bytes(shape) + g % parts * part_bytes(shape) + column * shape.scale_bytes;
  }
  Byte* minimum(int64_t g) const { return scale(g) + kPanel * shape.scale_bytes; }
  Byte* run(int64_t k) const {
    const int64_t run = k / kGroup, runs = runs_per_head(shape);
    return panel + run / runs * group_bytes(shape) + head_bytes(shape) + run % runs * run_bytes(shape);
  }
};

template <class Format>
static void pack_panel(const QuantizedPackArgs& a, int64_t panel) {
  const QuantizedShape& s = a.shape;
  const int64_t groups = num_groups(s), first = panel * kPanel;
  uint8_t* const packed = static_cast<uint8_t*>(a.packed);
  std::memset(packed + panel * panel_bytes(s), 0, panel_bytes(s));
  for (int64_t n = first; n < least(first + kPanel, s.out_features); ++n) {
    const Output<uint8_t> out(s, packed, n);
    for (int64_t g = 0; g < groups; ++g) {
      write_scale(out.scale(g), a.scales[n * groups + g], s.scale_bytes);
      if (Format::kHasMinimums) write_scale(out.minimum(g), a.minimums[n * groups + g], s.scale_bytes);
    }
    for (int64_t k = 0; k < s.in_features; k += kGroup) {
      uint8_t* const run = out.run(k);
      const int8_t* const values = a.values + n * s.in_features + k;
      const auto write = [&](int64_t inside) { Format::write(run, Format::place(out.column, inside), values[inside]); };
      if (k + kGroup <= s.in_features) {
#pragma GCC unroll 32
        for (int64_t inside = 0; inside < kGroup; ++inside) write(inside);
      } else {
        for (int64_t inside = 0; inside < s.in_features - k; ++inside) write(inside);
      }
    }
  }
}

template <class Format>
static void pack_thread(void* data, int thread, const Team& team) {
  const auto& a = *static_cast<const QuantizedPackArgs*>(data);
  const int64_t panels = num_panels(a.shape);
  const int64_t end = panels * (thread + 1) / team.num_threads;
  for (int64_t panel = panels * thread / team.num_threads; panel < end; ++panel) pack_panel<Format>(a, panel);
}

template <class Format>
static void unpack_as(const QuantizedPackArgs& a) {
  const QuantizedShape& s = a.shape;
  const int64_t groups = num_groups(s);
  for (int64_t n = 0; n < s.out_features; ++n) {
    const Output<const uint8_t> out(s, static_cast<const uint8_t*>(a.packed), n);
    for (int64_t g = 0; g < groups; ++g) {
      a.scales[n * groups + g] = read_scale(out.scale(g), s.scale_bytes);
      if (Format::kHasMinimums) a.minimums[n * groups + g] = read_scale(out.minimum(g), s.scale_bytes);
    }
    for (int64_t k = 0; k < s.in_features; ++k)
      a.values[n * s.in_features + k] =
          static_cast<int8_t>(Format::read(out.run(k), Format::place(out.column, k % kGroup)));
  }
}

template <class Format>
static void read_row_as(const QuantizedShape& s, const void* weight, int64_t n, float* to) {
  const Output<const uint8_t> out(s, static_cast<const uint8_t*>(weight), n);
  const int64_t step = least(kGroup, s.group_size);
  for (int64_t first = 0; first < s.in_features; first += step) {
    const int64_t group = first / s.group_size;
    const uint8_t* const run = out.run(first);
    const float scale = read_scale(out.scale(group), s.scale_bytes);
    const float minimum = Format::kHasMinimums ? read_scale(out.minimum(group), s.scale_bytes) : 0.0f;
    for (int64_t k = first; k < s.in_features && k < first + step; ++k) {
      float product = scale * Format::read(run, Format::place(out.column, k % kGroup));
      PENSTOCK_ROUNDED(product);
      to[k] = product + minimum;
    }
  }
}

static void pack(const QuantizedPackArgs& a) {
  with_format(a.shape, [&](auto format) {
    run_parallel(a.num_threads, pack_thread<decltype(format)>, const_cast<QuantizedPackArgs*>(&a));
  });
}

static void unpack(const QuantizedPackArgs& a) {
  with_format(a.shape, [&](auto format) { unpack_as<decltype(format)>(a); });
}

static void read_row(const QuantizedShape& s, const void* weight, int64_t n, float* out) {
  with_format(s, [&](auto format) { read_row_as<decltype(format)>(s, weight, n, out); });
}

}  // namespace PENSTOCK_NAMESPACE
