// Linear layers with int4 weights: a scale and a zero point per output feature and group of inner elements.
//
// The integer sum of a group is exact; the groups are then added in their order as floats.
// A panel holds its zero points, [group][output], and for every group its scales and [inner eights][output][4 bytes]:
// low nibbles are the first four elements, high nibbles the other four. Products of unsigned nibbles and signed bytes
// are small enough that vpmaddubsw cannot saturate, nor the sum of eight of its results.

namespace PENSTOCK_NAMESPACE {

constexpr int kInt4Vectors = 2;
constexpr int kInt4Panel = kInt4Vectors * kLanes;
constexpr int kInt4TileRows = PENSTOCK_INT4_TILE_ROWS;
constexpr int64_t kInt4Header = kInt4Panel * sizeof(float);  // per group
// Bytes of a panel's part that stays in the L1 cache while all rows pass over it.
constexpr int64_t kInt4Part = 16 * 1024;
// Inner elements that fit an int16 sum: 8 * 2 * 15 * 127 < 2^15.
constexpr int64_t kRun = 32;
constexpr int64_t kRunLines = kRun * kInt4Panel / 2 / kCacheLine;

PENSTOCK_INLINE int64_t num_groups(const QuantizedShape& s) { return (s.in_features + s.group_size - 1) / s.group_size; }
PENSTOCK_INLINE int64_t int4_zeros_bytes(const QuantizedShape& s) {
  return (num_groups(s) * kInt4Panel + 63) / 64 * 64;
}
PENSTOCK_INLINE int64_t int4_group_bytes(int64_t elements) { return kInt4Header + elements * kInt4Panel / 2; }
PENSTOCK_INLINE int64_t int4_panel_bytes(const QuantizedShape& s) {
  return int4_zeros_bytes(s) + num_groups(s) * kInt4Header + padded(s.in_features) * kInt4Panel / 2;
}

// Tiles of R rows by P panels, one after the other, over some groups.
//
// x: [unit of 4 elements][row], tiles R * row_units apart. group_sums: rows, sums_stride apart. zeros, weight: panels
// panel_stride apart; bias, out: out_panel_stride.
struct Int4Column {
  const int32_t* x;
  int64_t row_units;
  const int32_t* group_sums;
  int64_t sums_stride;
  const float* row_scales;
  const uint8_t* zeros;
  const uint8_t* weight;
  int64_t panel_stride, elements, group_size;
  const float* bias;
  float* out;
  int64_t out_stride, out_panel_stride;
  bool is_first, is_last;
  // Memory to prefetch meanwhile: next_step bytes per cache line of weights.
  const char* next;
  int64_t next_step;
  int64_t num_tiles;
};

// 32 inner elements: sum += x * weight.
template <int R>
PENSTOCK_INLINE void multiply_int4_run(const int32_t* x, const uint8_t* weight, IntVec (&sum)[R][kInt4Vectors]) {
#if !PENSTOCK_DOT_QUADS
  ShortVec shorts[R][kInt4Vectors]{};
#endif
#pragma GCC unroll 4
  for (int k = 0; k < kRun / 8; ++k) {
    ByteVec low[kInt4Vectors], high[kInt4Vectors];
    for (int v = 0; v < kInt4Vectors; ++v) {
      const ByteVec both = load_bytes<ByteVec>(weight + (k * kInt4Vectors + v) * sizeof(ByteVec));
      low[v] = low_halves(both);
      high[v] = high_halves(both);
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const ByteVec first = (ByteVec)splat_int(x[2 * k * R + i]);
      const ByteVec second = (ByteVec)splat_int(x[(2 * k + 1) * R + i]);
      for (int v = 0; v < kInt4Vectors; ++v) {
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
    for (int v = 0; v < kInt4Vectors; ++v) sum[i][v] += dot_pairs(shorts[i][v], ones);
#endif
}

// Adds a finished group: its exact integer sums, corrected for the zero points, times its scales.
template <int R>
PENSTOCK_INLINE void add_int4_group(const Int4Column& t, const int32_t* group_sums, int64_t g, const uint8_t* zeros,
                                    const uint8_t* group, const IntVec (&sum)[R][kInt4Vectors],
                                    Vec (&total)[R][kInt4Vectors]) {
  for (int v = 0; v < kInt4Vectors; ++v) {
    const Vec scale = load_bytes<Vec>(group + v * sizeof(Vec));
    const IntVec zero = widen(load_bytes<QuarterByteVec>(zeros + g * kInt4Panel + v * kLanes));
    for (int i = 0; i < R; ++i) {
      const IntVec exact = sum[i][v] - zero * group_sums[i * t.sums_stride + g];
      Vec product = __builtin_convertvector(exact, Vec) * scale;
      PENSTOCK_NEEDED_NOW(product);
      total[i][v] += product;
    }
  }
}

// With several panels, they alternate group by group.
template <int R, int P>
static __attribute__((noinline)) void run_int4_tiles(const Int4Column& t) {
  const char* next = t.next;
  for (int64_t tile = 0; tile < t.num_tiles; ++tile) {
    float* const out = t.out + tile * R * t.out_stride;
    const int32_t* group_sums = t.group_sums + tile * R * t.sums_stride;
    Vec total[P][R][kInt4Vectors];
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < R; ++i)
        for (int v = 0; v < kInt4Vectors; ++v)
          total[p][i][v] = t.is_first ? Vec{} : load(out + i * t.out_stride + p * t.out_panel_stride + v * kLanes);
    const int32_t* x = t.x + tile * R * t.row_units;
    const uint8_t* group = t.weight;
    for (int64_t first = 0, g = 0; first < t.elements; first += t.group_size, ++g) {
      const int64_t size = least(t.group_size, t.elements - first);
      for (int p = 0; p < P; ++p) {
        IntVec sum[R][kInt4Vectors]{};
        const int32_t* xs = x;
        const uint8_t* const panel = group + p * t.panel_stride;
        const uint8_t* weight = panel + kInt4Header;
        const char* fetched = next + p * t.panel_stride;
        for (int64_t k = 0; k < size; k += kRun, xs += kRun / 4 * R, weight += kRun * kInt4Panel / 2) {
          for (int line = 0; line < kRunLines; ++line) __builtin_prefetch(fetched + line * t.next_step);
          fetched += kRunLines * t.next_step;
          multiply_int4_run<R>(xs, weight, sum);
        }
        add_int4_group<R>(t, group_sums, g, t.zeros + p * t.panel_stride, panel, sum, total[p]);
      }
      x += size / 4 * R;
      next += size / kRun * kRunLines * t.next_step;
      group += int4_group_bytes(size);
    }
    const float* row_scales = t.row_scales + tile * R;
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < kInt4Vectors; ++v) {
        const int64_t column = p * t.out_panel_stride + v * kLanes;
        const Vec bias = t.bias == nullptr || !t.is_last ? Vec{} : load(t.bias + column);
        for (int i = 0; i < R; ++i) {
          Vec product = total[p][i][v] * splat(t.is_last ? row_scales[i] : 1.0f);
          PENSTOCK_NEEDED_NOW(product);
          store(out + i * t.out_stride + column, product + bias);
        }
      }
  }
}

// A single row takes several panels at once: several read streams give more memory bandwidth.
constexpr int64_t int4_panels_at_once(int64_t rows) { return rows == 1 ? 4 : 1; }

static void multiply_int4(int64_t rows, int64_t panels, const Int4Column& t) {
  if (panels == 4) return run_int4_tiles<1, 4>(t);
  with_constant<kInt4TileRows>(rows, [&](auto r) { run_int4_tiles<r, 1>(t); });
}

// Some panels times all rows of a chunk, into `out`, whose rows are out_stride apart; bias, out: of the first panel.
static void multiply_int4_panels(const QuantizedLinearArgs& a, const QuantizedRows& x, int64_t rows,
                                 const Panels& panels, const float* bias, float* out, int64_t out_stride) {
  const QuantizedShape& s = a.shape;
  const int64_t depth = padded(s.in_features), groups = num_groups(s), panel_bytes = int4_panel_bytes(s);
  const uint8_t* zeros = static_cast<const uint8_t*>(a.weight) + panels.first * panel_bytes;
  const uint8_t* weight = zeros + int4_zeros_bytes(s);
  const Tiles tiles(rows, kInt4TileRows);
  const int64_t fitting = kInt4Part / int4_group_bytes(s.group_size);
  const int64_t block = tiles.count == 1 ? depth : (fitting < 1 ? 1 : fitting) * s.group_size;
  for (int64_t k = 0, g = 0; k < depth; k += block) {
    const int64_t part = least(block, depth - k), num_parts = divided_up(part, s.group_size);
    const int64_t bytes = num_parts * kInt4Header + part * kInt4Panel / 2;
    const int64_t above = tiles.rows_of_taller();
    // Several tiles share the prefetch of the next part; a single tile prefetches its own weights PENSTOCK_AHEAD ahead.
    const bool is_single = tiles.count == 1;
    const char* const next = reinterpret_cast<const char*>(weight) + (is_single ? PENSTOCK_AHEAD : bytes);
    const int64_t next_step = divided_up(kCacheLine, tiles.count);
    Int4Column t{x.values + k / 4 * (tiles.height + 1), x.units, x.group_sums + g, groups, x.scales,
                 zeros + g * kInt4Panel, weight, panels.apart * panel_bytes, part, s.group_size, bias, out, out_stride,
                 panels.apart * kInt4Panel, k == 0, k + part == depth, next, next_step, tiles.num_taller};
    if (t.num_tiles > 0) multiply_int4(tiles.height + 1, panels.count, t);
    t.x = x.values + above * x.units + k / 4 * tiles.height;
    t.group_sums += above * groups;
    t.row_scales += above;
    t.out += above * out_stride;
    t.next += tiles.num_taller * next_step * (part / kRun * kRunLines);
    t.num_tiles = tiles.count - tiles.num_taller;
    multiply_int4(tiles.height, panels.count, t);
    weight += bytes;
    g += num_parts;
  }
}

// Location of an element: its byte within the panel after the zero points, and its nibble.
struct Int4Place {
  int64_t group, byte;
  int shift;
};

PENSTOCK_INLINE Int4Place int4_place(const QuantizedShape& s, int64_t n, int64_t k) {
  const int64_t group = k / s.group_size, inside = k % s.group_size;
  const int64_t start = group * int4_group_bytes(s.group_size) + kInt4Header;
  return {group, start + (inside / 8 * kInt4Panel + n) * 4 + inside % 4, inside % 8 < 4 ? 0 : 4};
}

static void pack_int4(const QuantizedPackArgs& a) {
  const QuantizedShape& s = a.shape;
  const int64_t bytes = int4_panel_bytes(s), groups = num_groups(s);
  uint8_t* zeros = static_cast<uint8_t*>(a.packed);
  for (int64_t first = 0; first < s.out_features; first += kInt4Panel, zeros += bytes) {
    std::memset(zeros, 0, bytes);
    uint8_t* panel = zeros + int4_zeros_bytes(s);
    for (int64_t n = 0; n < kInt4Panel && first + n < s.out_features; ++n) {
      for (int64_t g = 0; g < groups; ++g) {
        zeros[g * kInt4Panel + n] = a.zeros[(first + n) * groups + g];
        std::memcpy(panel + g * int4_group_bytes(s.group_size) + n * sizeof(float), a.scales + (first + n) * groups + g,
                    sizeof(float));
      }
      for (int64_t k = 0; k < s.in_features; ++k) {
        const Int4Place place = int4_place(s, n, k);
        panel[place.byte] |= static_cast<uint8_t>(a.values[(first + n) * s.in_features + k] << place.shift);
      }
    }
  }
}

static void unpack_int4(const QuantizedPackArgs& a) {
  const QuantizedShape& s = a.shape;
  const int64_t groups = num_groups(s);
  for (int64_t n = 0; n < s.out_features; ++n) {
    const uint8_t* zeros = static_cast<const uint8_t*>(a.packed) + n / kInt4Panel * int4_panel_bytes(s);
    const uint8_t* panel = zeros + int4_zeros_bytes(s);
    const int64_t column = n % kInt4Panel;
    for (int64_t g = 0; g < groups; ++g) {
      a.zeros[n * groups + g] = zeros[g * kInt4Panel + column];
      std::memcpy(a.scales + n * groups + g, panel + g * int4_group_bytes(s.group_size) + column * sizeof(float),
                  sizeof(float));
    }
    for (int64_t k = 0; k < s.in_features; ++k) {
      const Int4Place place = int4_place(s, column, k);
      a.values[n * s.in_features + k] = panel[place.byte] >> place.shift & 15;
    }
  }
}

static void read_int4_row(const QuantizedShape& s, const void* weight, int64_t n, float* out) {
  const uint8_t* zeros = static_cast<const uint8_t*>(weight) + n / kInt4Panel * int4_panel_bytes(s);
  const uint8_t* panel = zeros + int4_zeros_bytes(s);
  const int64_t column = n % kInt4Panel;
  for (int64_t k = 0; k < s.in_features; ++k) {
    const Int4Place place = int4_place(s, column, k);
    float scale;
    std::memcpy(&scale, panel + place.group * int4_group_bytes(s.group_size) + column * sizeof(float), sizeof scale);
    out[k] = scale * ((panel[place.byte] >> place.shift & 15) - zeros[place.group * kInt4Panel + column]);
  }
}

}  // namespace PENSTOCK_NAMESPACE
