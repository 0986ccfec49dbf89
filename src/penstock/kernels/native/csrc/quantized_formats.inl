// Formats of packed weights: int8, and int4 with zero points.
//
// A panel is some outputs: their zero points (int4), [scale group][output], and for every scale group its scales and its
// runs of kGroup inner elements.

namespace PENSTOCK_NAMESPACE {

constexpr int kPanelVectors = 2;
constexpr int kPanel = kPanelVectors * kLanes;
constexpr int64_t kScaleBytes = kPanel * sizeof(float);  // per scale group

// A run is [unit][output][4 bytes]. VNNI has products of unsigned and signed bytes: the weights are offset by 128.
struct Int8Format {
  static constexpr int64_t kRunBytes = kGroup * kPanel;
  static constexpr bool kHasZeros = false;
  static constexpr int kStored = PENSTOCK_DOT_QUADS ? 128 : 0;

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

  // sum += x * weight, of one run and R rows.
  template <int R>
  PENSTOCK_INLINE void multiply(const int32_t* x, const uint8_t* run, IntVec (&sum)[R][kPanelVectors]) {
#pragma GCC unroll 8
    for (int unit = 0; unit < kGroupUnits; ++unit) {
      ByteVec w[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v)
        w[v] = load_bytes<ByteVec>(run + (unit * kPanelVectors + v) * sizeof(ByteVec));
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        const ByteVec xi = (ByteVec)splat_int(x[unit * R + i]);
        for (int v = 0; v < kPanelVectors; ++v) {
          sum[i][v] = PENSTOCK_DOT_QUADS ? add_dot_quads(sum[i][v], w[v], xi) : add_dot_signed_quads(sum[i][v], w[v], xi);
          PENSTOCK_NEEDED_NOW(sum[i][v]);
        }
      }
    }
  }
};

// A run is [two units][output][4 bytes]: low nibbles are the first unit, high nibbles the other. Products of unsigned
// nibbles and signed bytes are small enough that vpmaddubsw cannot saturate, nor the sum of a run of its results.
struct Int4Format {
  static constexpr int64_t kRunBytes = kGroup * kPanel / 2;
  static constexpr bool kHasZeros = true;

  struct Place {
    int64_t byte;
    int shift;
  };
  PENSTOCK_INLINE Place place(int64_t n, int64_t inside) {
    return {(inside / 8 * kPanel + n) * 4 + inside % 4, inside % 8 < 4 ? 0 : 4};
  }
  PENSTOCK_INLINE int read(const uint8_t* run, Place place) { return run[place.byte] >> place.shift & 15; }
  PENSTOCK_INLINE void write(uint8_t* run, Place place, int value) {
    run[place.byte] |= static_cast<uint8_t>(value << place.shift);
  }

  template <int R>
  PENSTOCK_INLINE void multiply(const int32_t* x, const uint8_t* run, IntVec (&sum)[R][kPanelVectors]) {
#if !PENSTOCK_DOT_QUADS
    static_assert(kGroup / 4 * 2 * 15 * 127 < 1 << 15);
    ShortVec shorts[R][kPanelVectors]{};
#endif
#pragma GCC unroll 4
    for (int k = 0; k < kGroupUnits / 2; ++k) {
      ByteVec low[kPanelVectors], high[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) {
        const ByteVec both = load_bytes<ByteVec>(run + (k * kPanelVectors + v) * sizeof(ByteVec));
        low[v] = low_halves(both);
        high[v] = high_halves(both);
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

// Integer sums start at kMagic, so that as floats they are kMagic more: this takes it off, with what the offset of
// stored weights adds; of int4 it is the sum that zero points are multiplied by.
PENSTOCK_INLINE Offset row_offset(const QuantizedShape& s) {
  return s.bits == 4 ? Offset{0.0f, 1.0f} : Offset{kMagic, static_cast<float>(Int8Format::kStored)};
}

// Calls run(format) with the format of a weight.
template <class Function>
PENSTOCK_INLINE void with_format(const QuantizedShape& s, const Function& run) {
  s.bits == 8 ? run(Int8Format{}) : run(Int4Format{});
}

PENSTOCK_INLINE int64_t num_groups(const QuantizedShape& s) { return divided_up(s.in_features, s.group_size); }
PENSTOCK_INLINE int64_t run_bytes(const QuantizedShape& s) {
  return s.bits == 8 ? Int8Format::kRunBytes : Int4Format::kRunBytes;
}
PENSTOCK_INLINE int64_t zeros_bytes(const QuantizedShape& s) {
  return s.bits == 8 ? 0 : divided_up(num_groups(s) * kPanel, kCacheLine) * kCacheLine;
}
PENSTOCK_INLINE int64_t group_bytes(const QuantizedShape& s) {
  return kScaleBytes + s.group_size / kGroup * run_bytes(s);
}
PENSTOCK_INLINE int64_t panel_bytes(const QuantizedShape& s) {
  return zeros_bytes(s) + num_groups(s) * kScaleBytes + num_row_groups(s.in_features) * run_bytes(s);
}
PENSTOCK_INLINE int64_t num_panels(const QuantizedShape& s) { return divided_up(s.out_features, kPanel); }

// Address of an output: of its zero points and scales, a scale group apart.
template <class Byte>
struct Output {
  const QuantizedShape& shape;
  Byte* panel;
  int64_t column;

  Output(const QuantizedShape& s, Byte* packed, int64_t n)
      : shape(s), panel(packed + n / kPanel * panel_bytes(s)), column(n % kPanel) {}

  Byte* zero(int64_t group) const { return panel + group * kPanel + column; }
  Byte* group(int64_t group) const { return panel + zeros_bytes(shape) + group * group_bytes(shape); }
  Byte* scale(int64_t g) const { return group(g) + column * sizeof(float); }
  Byte* run(int64_t k) const {
    return group(k / shape.group_size) + kScaleBytes + k % shape.group_size / kGroup * run_bytes(shape);
  }
};

template <class Format>
static void pack_as(const QuantizedPackArgs& a) {
  const QuantizedShape& s = a.shape;
  const int64_t groups = num_groups(s);
  uint8_t* const packed = static_cast<uint8_t*>(a.packed);
  std::memset(packed, 0, num_panels(s) * panel_bytes(s));
  for (int64_t n = 0; n < s.out_features; ++n) {
    const Output<uint8_t> out(s, packed, n);
    for (int64_t g = 0; g < groups; ++g) {
      if (Format::kHasZeros) *out.zero(g) = a.zeros[n * groups + g];
      std::memcpy(out.scale(g), a.scales + n * groups + g, sizeof(float));
    }
    for (int64_t k = 0; k < s.in_features; ++k)
      Format::write(out.run(k), Format::place(out.column, k % kGroup), a.values[n * s.in_features + k]);
  }
}

template <class Format>
static void unpack_as(const QuantizedPackArgs& a) {
  const QuantizedShape& s = a.shape;
  const int64_t groups = num_groups(s);
  for (int64_t n = 0; n < s.out_features; ++n) {
    const Output<const uint8_t> out(s, static_cast<const uint8_t*>(a.packed), n);
    for (int64_t g = 0; g < groups; ++g) {
      if (Format::kHasZeros) a.zeros[n * groups + g] = *out.zero(g);
      std::memcpy(a.scales + n * groups + g, out.scale(g), sizeof(float));
    }
    for (int64_t k = 0; k < s.in_features; ++k)
      a.values[n * s.in_features + k] =
          static_cast<int8_t>(Format::read(out.run(k), Format::place(out.column, k % kGroup)));
  }
}

template <class Format>
static void read_row_as(const QuantizedShape& s, const void* weight, int64_t n, float* to) {
  const Output<const uint8_t> out(s, static_cast<const uint8_t*>(weight), n);
  for (int64_t first = 0; first < s.in_features; first += kGroup) {
    const int64_t group = first / s.group_size;
    const uint8_t* const run = out.run(first);
    const int zero = Format::kHasZeros ? *out.zero(group) : 0;
    float scale;
    std::memcpy(&scale, out.scale(group), sizeof scale);
    for (int64_t k = first; k < s.in_features && k < first + kGroup; ++k)
      to[k] = scale * (Format::read(run, Format::place(out.column, k - first)) - zero);
  }
}

static void pack(const QuantizedPackArgs& a) {
  with_format(a.shape, [&](auto format) { pack_as<decltype(format)>(a); });
}

static void unpack(const QuantizedPackArgs& a) {
  with_format(a.shape, [&](auto format) { unpack_as<decltype(format)>(a); });
}

static void read_row(const QuantizedShape& s, const void* weight, int64_t n, float* out) {
  with_format(s, [&](auto format) { read_row_as<decltype(format)>(s, weight, n, out); });
}

}  // namespace PENSTOCK_NAMESPACE
