// Products with 4-bit weights: a scale and a zero point per output feature and group of inner elements.
//
// The integer sum of a group is exact; the groups are then added in their order as floats.
// A panel is its zero points, [group][output], and for every group its scales and [inner eights][output][4 bytes], whose
// lower halves are the first four elements and upper halves the other four. Products of unsigned halves and signed bytes
// are small enough that vpmaddubsw cannot saturate, nor eight of its results together.

namespace PENSTOCK_NAMESPACE {

constexpr int kInt4Vectors = 2;
constexpr int kInt4Panel = kInt4Vectors * kLanes;
constexpr int kInt4TileRows = PENSTOCK_INT4_TILE_ROWS;
constexpr int64_t kInt4Header = kInt4Panel * sizeof(float);  // of a group
// Bytes of a panel's part that stays in the first-level cache while all rows pass over it.
constexpr int64_t kInt4Part = 16 * 1024;
// Sums of 16 bits hold so many inner elements: 8 * 2 * 15 * 127 < 2^15.
constexpr int64_t kRun = 32;

PENSTOCK_INLINE int64_t num_groups(const QuantizedShape& s) { return (s.in_features + s.group_size - 1) / s.group_size; }
PENSTOCK_INLINE int64_t int4_zeros_bytes(const QuantizedShape& s) {
  return (num_groups(s) * kInt4Panel + 63) / 64 * 64;
}
PENSTOCK_INLINE int64_t int4_group_bytes(int64_t elements) { return kInt4Header + elements * kInt4Panel / 2; }
PENSTOCK_INLINE int64_t int4_panel_bytes(const QuantizedShape& s) {
  return int4_zeros_bytes(s) + num_groups(s) * kInt4Header + padded(s.in_features) * kInt4Panel / 2;
}

// A tile of rows by one panel, over some groups.
//
// x: [unit of 4 elements][row]. group_sums: rows, sums_stride apart.
struct Int4Part {
  const int32_t* x;
  const int32_t* group_sums;
  int64_t sums_stride;
  const float* row_scales;
  const uint8_t* zeros;
  const uint8_t* weight;
  int64_t elements, group_size;
  const float* bias;
  float* out;
  int64_t out_stride;
  bool is_first, is_last;
  const char* next;
  int64_t next_step;
};

// 32 inner elements: sum += x * weight.
template <int R>
PENSTOCK_INLINE void multiply_int4_run(const int32_t* x, const uint8_t* weight, IntVec (&sum)[R][kInt4Vectors]) {
#if PENSTOCK_DOT_QUADS
  for (int k = 0; k < kRun / 8; ++k) {
    ByteVec low[kInt4Vectors], high[kInt4Vectors];
    for (int v = 0; v < kInt4Vectors; ++v) {
      const ByteVec both = load_bytes<ByteVec>(weight + (k * kInt4Vectors + v) * sizeof(ByteVec));
      low[v] = low_halves(both);
      high[v] = high_halves(both);
    }
    for (int i = 0; i < R; ++i) {
      const ByteVec first = (ByteVec)splat_int(x[2 * k * R + i]);
      const ByteVec second = (ByteVec)splat_int(x[(2 * k + 1) * R + i]);
      for (int v = 0; v < kInt4Vectors; ++v)
        sum[i][v] = add_dot_quads(add_dot_quads(sum[i][v], low[v], first), high[v], second);
    }
  }
#else
  ShortVec shorts[R][kInt4Vectors]{};
  for (int k = 0; k < kRun / 8; ++k) {
    ByteVec low[kInt4Vectors], high[kInt4Vectors];
    for (int v = 0; v < kInt4Vectors; ++v) {
      const ByteVec both = load_bytes<ByteVec>(weight + (k * kInt4Vectors + v) * sizeof(ByteVec));
      low[v] = low_halves(both);
      high[v] = high_halves(both);
    }
    for (int i = 0; i < R; ++i) {
      const ByteVec first = (ByteVec)splat_int(x[2 * k * R + i]);
      const ByteVec second = (ByteVec)splat_int(x[(2 * k + 1) * R + i]);
      for (int v = 0; v < kInt4Vectors; ++v) {
        shorts[i][v] += dot_byte_pairs(low[v], first);
        PENSTOCK_NEEDED_NOW(shorts[i][v]);
        shorts[i][v] += dot_byte_pairs(high[v], second);
        PENSTOCK_NEEDED_NOW(shorts[i][v]);
      }
    }
  }
  const ShortVec ones = ShortVec{} + 1;
  for (int i = 0; i < R; ++i)
    for (int v = 0; v < kInt4Vectors; ++v) sum[i][v] += dot_pairs(shorts[i][v], ones);
#endif
}

template <int R>
static __attribute__((noinline)) void run_int4_tile(const Int4Part& p) {
  Vec total[R][kInt4Vectors];
  for (int i = 0; i < R; ++i)
    for (int v = 0; v < kInt4Vectors; ++v)
      total[i][v] = p.is_first ? Vec{} : load(p.out + i * p.out_stride + v * kLanes);
  const int32_t* x = p.x;
  const uint8_t* group = p.weight;
  const char* next = p.next;
  for (int64_t first = 0, g = 0; first < p.elements; first += p.group_size, ++g) {
    const int64_t size = p.elements - first < p.group_size ? p.elements - first : p.group_size;
    IntVec sum[R][kInt4Vectors]{};
    const uint8_t* weight = group + kInt4Header;
    for (int64_t k = 0; k < size; k += kRun, x += kRun / 4 * R, weight += kRun * kInt4Panel / 2) {
      for (int line = 0; line < kRun * kInt4Panel / 2 / 64; ++line) __builtin_prefetch(next + line * p.next_step);
      next += kRun * kInt4Panel / 2 / 64 * p.next_step;
      multiply_int4_run<R>(x, weight, sum);
    }
    for (int v = 0; v < kInt4Vectors; ++v) {
      const Vec scale = load_bytes<Vec>(group + v * sizeof(Vec));
      const IntVec zero = __builtin_convertvector(
          load_bytes<QuarterByteVec>(p.zeros + g * kInt4Panel + v * kLanes), IntVec);
      for (int i = 0; i < R; ++i) {
        const IntVec exact = sum[i][v] - zero * p.group_sums[i * p.sums_stride + g];
        Vec product = __builtin_convertvector(exact, Vec) * scale;
        PENSTOCK_NEEDED_NOW(product);
        total[i][v] += product;
      }
    }
    group += int4_group_bytes(size);
  }
  for (int v = 0; v < kInt4Vectors; ++v) {
    const Vec bias = p.bias == nullptr || !p.is_last ? Vec{} : load(p.bias + v * kLanes);
    for (int i = 0; i < R; ++i) {
      Vec product = total[i][v] * splat(p.is_last ? p.row_scales[i] : 1.0f);
      PENSTOCK_NEEDED_NOW(product);
      store(p.out + i * p.out_stride + v * kLanes, product + bias);
    }
  }
}

static void multiply_int4(int rows, const Int4Part& p) {
  switch (rows) {
    case 1: return run_int4_tile<1>(p);
    case 2: return run_int4_tile<2>(p);
    case 3: return run_int4_tile<3>(p);
#if PENSTOCK_INT4_TILE_ROWS > 4
    case 4: return run_int4_tile<4>(p);
    case 5: return run_int4_tile<5>(p);
    case 6: return run_int4_tile<6>(p);
    case 7: return run_int4_tile<7>(p);
#endif
    default: return run_int4_tile<kInt4TileRows>(p);
  }
}

// One panel times all rows of a chunk. The last panel may be wider than the output: it goes through a buffer.
static void multiply_int4_panel(const QuantizedLinearArgs& a, const QuantizedRows& x, int64_t first_row, int64_t rows,
                                int64_t panel) {
  const QuantizedShape& s = a.shape;
  const int64_t depth = padded(s.in_features);
  const uint8_t* zeros = static_cast<const uint8_t*>(a.weight) + panel * int4_panel_bytes(s);
  const uint8_t* weight = zeros + int4_zeros_bytes(s);
  const int64_t first = panel * kInt4Panel;
  const int64_t left = s.out_features - first, columns = left < kInt4Panel ? left : kInt4Panel;
  const bool is_edge = columns < kInt4Panel;
  const int64_t num_tiles = (rows + kInt4TileRows - 1) / kInt4TileRows;
  const int64_t fitting = kInt4Part / int4_group_bytes(s.group_size);
  const int64_t block = num_tiles == 1 || is_edge ? depth : (fitting < 1 ? 1 : fitting) * s.group_size;
  float edge[kInt4TileRows * kInt4Panel], edge_bias[kInt4Panel] = {};
  const float* bias = a.bias == nullptr ? nullptr : a.bias + first;
  if (is_edge && bias != nullptr) {
    std::memcpy(edge_bias, bias, columns * sizeof(float));
    bias = edge_bias;
  }
  const uint8_t* from = weight;
  for (int64_t k = 0, g = 0; k < depth; k += block) {
    const int64_t part = depth - k < block ? depth - k : block;
    const int64_t groups = (part + s.group_size - 1) / s.group_size;
    const int64_t bytes = groups * kInt4Header + part * kInt4Panel / 2;
    // As with 8 bits: tiles share the fetching of what comes next, a single one looks a little ahead.
    const char* next = reinterpret_cast<const char*>(from) + (num_tiles == 1 ? PENSTOCK_AHEAD : bytes);
    const int64_t next_step = num_tiles == 1 ? 64 : (64 + num_tiles - 1) / num_tiles;
    for (int64_t start = 0, tile = 0; start < rows; start += kInt4TileRows, ++tile) {
      const int height = static_cast<int>(rows - start < kInt4TileRows ? rows - start : kInt4TileRows);
      float* out = is_edge ? edge : a.out + (first_row + start) * a.out_stride + first;
      const int64_t share = num_tiles == 1 ? 0 : tile * next_step * (part * kInt4Panel / 2 / 64);
      multiply_int4(height, {x.values + start * x.units + k / 4 * height, x.group_sums + start * num_groups(s) + g,
                             num_groups(s), x.scales + start, zeros + g * kInt4Panel, from, part, s.group_size, bias,
                             out, is_edge ? kInt4Panel : a.out_stride, k == 0, k + part == depth, next + share,
                             next_step});
      if (is_edge)
        for (int i = 0; i < height; ++i)
          std::memcpy(a.out + (first_row + start + i) * a.out_stride + first, edge + i * kInt4Panel,
                      columns * sizeof(float));
    }
    from += bytes;
    g += groups;
  }
}

// Where an element lies: its byte within the panel after the zero points, and the half of it.
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
