// Products with 8-bit weights: one scale per output feature, exact integer sums.
//
// A panel is a header (scales, and sums of weights where those are needed) and [inner steps][output][elements of a step].
// Without an instruction for four products of bytes, both sides are widened to 16 bits: multiplying bytes directly
// (vpmaddubsw) would saturate, and costs as many multiplications.

namespace PENSTOCK_NAMESPACE {

constexpr int kInt8Vectors = 2;
constexpr int kInt8Panel = kInt8Vectors * kLanes;
constexpr int kInt8TileRows = PENSTOCK_TILE_ROWS;
#if PENSTOCK_DOT_QUADS
constexpr int kStep = 4;
constexpr Form kInt8Form = Form::kOffsetByte;
constexpr int64_t kInt8Header = kInt8Panel * (sizeof(float) + sizeof(int32_t));
#else
constexpr int kStep = 2;
constexpr Form kInt8Form = Form::kShort;
constexpr int64_t kInt8Header = kInt8Panel * sizeof(float);
#endif
// Bytes of a panel's part that stays in the first-level cache while all rows pass over it.
constexpr int64_t kInt8Part = 12 * 1024;

PENSTOCK_INLINE int64_t int8_panel_bytes(int64_t in_features) { return kInt8Header + padded(in_features) * kInt8Panel; }

// A tile of rows by one panel, over a part of the inner dimension.
//
// x: [step][row]. out: holds the integers summed so far until the last part.
struct Int8Part {
  const int32_t* x;
  const float* row_scales;
  const int8_t* header;
  const int8_t* weight;
  int64_t steps;
  const float* bias;
  float* out;
  int64_t out_stride;
  bool is_first, is_last;
  const char* next;
  int64_t next_step;
};

// One step: sum += x * weight.
template <int R>
PENSTOCK_INLINE void multiply_int8_step(const int32_t* x, const int8_t* weight, IntVec (&sum)[R][kInt8Vectors]) {
#if PENSTOCK_DOT_QUADS
  ByteVec w[kInt8Vectors];
  for (int v = 0; v < kInt8Vectors; ++v) w[v] = load_bytes<ByteVec>(weight + v * sizeof(ByteVec));
  for (int i = 0; i < R; ++i) {
    const ByteVec xi = (ByteVec)splat_int(x[i]);
    for (int v = 0; v < kInt8Vectors; ++v) sum[i][v] = add_dot_quads(sum[i][v], xi, w[v]);
  }
#else
  ShortVec w[kInt8Vectors];
  for (int v = 0; v < kInt8Vectors; ++v) w[v] = widen(load_bytes<HalfByteVec>(weight + v * sizeof(HalfByteVec)));
  for (int i = 0; i < R; ++i) {
    const ShortVec xi = (ShortVec)splat_int(x[i]);
    for (int v = 0; v < kInt8Vectors; ++v) {
      IntVec total = sum[i][v] + dot_pairs(w[v], xi);
      PENSTOCK_NEEDED_NOW(total);
      sum[i][v] = total;
    }
  }
#endif
}

template <int R>
static __attribute__((noinline)) void run_int8_tile(const Int8Part& p) {
  IntVec sum[R][kInt8Vectors];
  for (int i = 0; i < R; ++i)
    for (int v = 0; v < kInt8Vectors; ++v)
      sum[i][v] = p.is_first ? IntVec{} : (IntVec)load(p.out + i * p.out_stride + v * kLanes);
  const int32_t* x = p.x;
  const int8_t* weight = p.weight;
  const char* next = p.next;
  for (int64_t k = 0; k < p.steps; k += 2) {
    __builtin_prefetch(next);
    multiply_int8_step<R>(x, weight, sum);
    multiply_int8_step<R>(x + R, weight + kStep * kInt8Panel, sum);
    x += 2 * R;
    weight += 2 * kStep * kInt8Panel;
    next += p.next_step;
  }
  if (!p.is_last) {
    for (int i = 0; i < R; ++i)
      for (int v = 0; v < kInt8Vectors; ++v) store(p.out + i * p.out_stride + v * kLanes, (Vec)sum[i][v]);
    return;
  }
  for (int v = 0; v < kInt8Vectors; ++v) {
    const Vec scale = load_bytes<Vec>(p.header + v * sizeof(Vec));
    const Vec bias = p.bias == nullptr ? Vec{} : load(p.bias + v * kLanes);
#if PENSTOCK_DOT_QUADS
    const IntVec excess = load_bytes<IntVec>(p.header + (kInt8Vectors + v) * sizeof(Vec));
#else
    const IntVec excess{};
#endif
    for (int i = 0; i < R; ++i) {
      Vec product = __builtin_convertvector(sum[i][v] - excess, Vec) * (scale * p.row_scales[i]);
      PENSTOCK_NEEDED_NOW(product);
      store(p.out + i * p.out_stride + v * kLanes, product + bias);
    }
  }
}

static void multiply_int8(int rows, const Int8Part& p) {
  switch (rows) {
    case 1: return run_int8_tile<1>(p);
    case 2: return run_int8_tile<2>(p);
    case 3: return run_int8_tile<3>(p);
    case 4: return run_int8_tile<4>(p);
    case 5: return run_int8_tile<5>(p);
#if PENSTOCK_TILE_ROWS > 6
    case 6: return run_int8_tile<6>(p);
    case 7: return run_int8_tile<7>(p);
    case 8: return run_int8_tile<8>(p);
    case 9: return run_int8_tile<9>(p);
    case 10: return run_int8_tile<10>(p);
    case 11: return run_int8_tile<11>(p);
#endif
    default: return run_int8_tile<kInt8TileRows>(p);
  }
}

// One panel times all rows of a chunk. The last panel may be wider than the output: it goes through a buffer.
static void multiply_int8_panel(const QuantizedLinearArgs& a, const QuantizedRows& x, int64_t first_row, int64_t rows,
                                int64_t panel) {
  const int64_t depth = padded(a.shape.in_features);
  const int8_t* header = static_cast<const int8_t*>(a.weight) + panel * int8_panel_bytes(a.shape.in_features);
  const int8_t* weight = header + kInt8Header;
  const int64_t first = panel * kInt8Panel;
  const int64_t left = a.shape.out_features - first, columns = left < kInt8Panel ? left : kInt8Panel;
  const bool is_edge = columns < kInt8Panel;
  const int64_t num_tiles = (rows + kInt8TileRows - 1) / kInt8TileRows;
  const int64_t block = num_tiles == 1 || is_edge ? depth : kInt8Part / kInt8Panel;
  float edge[kInt8TileRows * kInt8Panel], edge_bias[kInt8Panel] = {};
  const float* bias = a.bias == nullptr ? nullptr : a.bias + first;
  if (is_edge && bias != nullptr) {
    std::memcpy(edge_bias, bias, columns * sizeof(float));
    bias = edge_bias;
  }
  for (int64_t k = 0; k < depth; k += block) {
    const int64_t part = depth - k < block ? depth - k : block;
    // While the rows pass over this part, the one after it is fetched, a share by each tile; a single tile fetches
    // what it comes to itself a little later.
    const char* part_end = reinterpret_cast<const char*>(weight + (k + part) * kInt8Panel);
    const char* next = num_tiles == 1 ? reinterpret_cast<const char*>(weight + k * kInt8Panel) + PENSTOCK_AHEAD : part_end;
    const int64_t step_bytes = 2 * kStep * kInt8Panel;  // of two steps, which are taken together
    const int64_t next_step = num_tiles == 1 ? step_bytes : (step_bytes + num_tiles - 1) / num_tiles;
    for (int64_t start = 0, tile = 0; start < rows; start += kInt8TileRows, ++tile) {
      const int height = static_cast<int>(rows - start < kInt8TileRows ? rows - start : kInt8TileRows);
      float* out = is_edge ? edge : a.out + (first_row + start) * a.out_stride + first;
      multiply_int8(height, {x.values + start * x.units + k / kStep * height, x.scales + start, header,
                             weight + k * kInt8Panel, part / kStep, bias, out, is_edge ? kInt8Panel : a.out_stride,
                             k == 0, k + part == depth,
                             num_tiles == 1 ? next : next + tile * next_step * (part / kStep / 2), next_step});
      if (is_edge)
        for (int i = 0; i < height; ++i)
          std::memcpy(a.out + (first_row + start + i) * a.out_stride + first, edge + i * kInt8Panel,
                      columns * sizeof(float));
    }
  }
}

PENSTOCK_INLINE int64_t int8_offset(int64_t n, int64_t k) {
  return k / kStep * kInt8Panel * kStep + n * kStep + k % kStep;
}

static void pack_int8(const QuantizedPackArgs& a) {
  const int64_t depth = a.shape.in_features, bytes = int8_panel_bytes(depth);
  int8_t* header = static_cast<int8_t*>(a.packed);
  for (int64_t first = 0; first < a.shape.out_features; first += kInt8Panel, header += bytes) {
    std::memset(header, 0, bytes);
    for (int64_t n = 0; n < kInt8Panel && first + n < a.shape.out_features; ++n) {
      const int8_t* values = a.values + (first + n) * depth;
      int32_t sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        header[kInt8Header + int8_offset(n, k)] = values[k];
        sum += values[k];
      }
      std::memcpy(header + n * sizeof(float), a.scales + first + n, sizeof(float));
      sum *= 128;  // what offset bytes add to every product
      if (kInt8Form == Form::kOffsetByte) std::memcpy(header + (kInt8Panel + n) * sizeof(float), &sum, sizeof sum);
    }
  }
}

static void unpack_int8(const QuantizedPackArgs& a) {
  const int64_t depth = a.shape.in_features;
  for (int64_t n = 0; n < a.shape.out_features; ++n) {
    const int8_t* header = static_cast<const int8_t*>(a.packed) + n / kInt8Panel * int8_panel_bytes(depth);
    const int64_t column = n % kInt8Panel;
    std::memcpy(a.scales + n, header + column * sizeof(float), sizeof(float));
    for (int64_t k = 0; k < depth; ++k) a.values[n * depth + k] = header[kInt8Header + int8_offset(column, k)];
  }
}

static void read_int8_row(const QuantizedShape& shape, const void* weight, int64_t n, float* out) {
  const int8_t* header = static_cast<const int8_t*>(weight) + n / kInt8Panel * int8_panel_bytes(shape.in_features);
  float scale;
  std::memcpy(&scale, header + n % kInt8Panel * sizeof(float), sizeof scale);
  const int8_t* values = header + kInt8Header + n % kInt8Panel * kStep;
  for (int64_t k = 0; k < shape.in_features; ++k)
    out[k] = scale * values[k / kStep * kInt8Panel * kStep + k % kStep];
}

}  // namespace PENSTOCK_NAMESPACE
