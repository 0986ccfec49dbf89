// Linear layers with int8 weights: one scale per output feature, exact integer sums.
//
// A packed weight is a cache line with its form (Pairs or Quads), then panels. A panel is a header (scales, and a
// correction to subtract from every sum) and [inner steps][output][elements of a step].

namespace PENSTOCK_NAMESPACE {

constexpr int kInt8Vectors = 2;
constexpr int kInt8Panel = kInt8Vectors * kLanes;
constexpr int64_t kInt8Header = kInt8Panel * (sizeof(float) + sizeof(int32_t));

// Two inner elements at a time, both operands widened to int16: for any weights.
struct Pairs {
  static constexpr Form kForm = Form::kShort;
  static constexpr int kStep = 2;
  static constexpr int kTileRows = PENSTOCK_TILE_ROWS;
};

// Four bytes at a time, a third to a half faster. Activations are offset by 128, which makes them unsigned. Without
// VNNI, only for weights in which no two neighbours sum to a magnitude above kMostOfNeighbours; adding up the pair sums
// then needs ones in a register.
struct Quads {
  static constexpr Form kForm = Form::kOffsetByte;
  static constexpr int kStep = 4;
  static constexpr int kTileRows = PENSTOCK_DOT_QUADS ? PENSTOCK_TILE_ROWS : PENSTOCK_TILE_ROWS - 1;
};

// 255 * 128 < 2^15.
constexpr int kMostOfNeighbours = 128;

// Bytes of a panel's part that stays in the L1 cache while all rows pass over it.
constexpr int64_t kInt8Part = 12 * 1024;

PENSTOCK_INLINE int64_t int8_panel_bytes(int64_t in_features) { return kInt8Header + padded(in_features) * kInt8Panel; }

PENSTOCK_INLINE const int8_t* int8_panel(const void* packed, int64_t in_features, int64_t panel) {
  return static_cast<const int8_t*>(packed) + kCacheLine + panel * int8_panel_bytes(in_features);
}

PENSTOCK_INLINE Form int8_form(const void* packed) { return static_cast<Form>(*static_cast<const int8_t*>(packed)); }
PENSTOCK_INLINE int int8_step(Form form) { return form == Form::kShort ? Pairs::kStep : Quads::kStep; }

// Tiles of R rows by P panels, one after the other, over a part of the inner dimension.
//
// x: [step][row], tiles R * row_units apart. header, weight: panels panel_stride apart. out, bias: panels
// out_panel_stride apart; out holds the partial integer sums until the last part.
struct Int8Column {
  const int32_t* x;
  int64_t row_units;
  const float* row_scales;
  const int8_t* header;
  const int8_t* weight;
  int64_t panel_stride, steps;
  const float* bias;
  float* out;
  int64_t out_stride, out_panel_stride;
  bool is_first, is_last;
  // Memory to prefetch meanwhile: next_step bytes per cache line of weights.
  const char* next;
  int64_t next_step;
  int64_t num_tiles;
};

// Steps per loop iteration; divides the steps of any part.
constexpr int64_t kInt8Unroll = 4;

// One step: sum += x * weight.
template <int R, int P>
PENSTOCK_INLINE void multiply_int8_step(Quads, const int32_t* x, const int8_t* weight, int64_t panel_stride,
                                        IntVec (&sum)[R][P][kInt8Vectors]) {
  ByteVec w[P][kInt8Vectors];
  for (int p = 0; p < P; ++p)
    for (int v = 0; v < kInt8Vectors; ++v)
      w[p][v] = load_bytes<ByteVec>(weight + p * panel_stride + v * sizeof(ByteVec));
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
    const ByteVec xi = (ByteVec)splat_int(x[i]);
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < kInt8Vectors; ++v) {
        sum[i][p][v] = add_dot_quads(sum[i][p][v], xi, w[p][v]);
        PENSTOCK_NEEDED_NOW(sum[i][p][v]);
      }
  }
}

template <int R, int P>
PENSTOCK_INLINE void multiply_int8_step(Pairs, const int32_t* x, const int8_t* weight, int64_t panel_stride,
                                        IntVec (&sum)[R][P][kInt8Vectors]) {
  ShortVec w[P][kInt8Vectors];
  for (int p = 0; p < P; ++p)
    for (int v = 0; v < kInt8Vectors; ++v)
      w[p][v] = widen(load_bytes<HalfByteVec>(weight + p * panel_stride + v * sizeof(HalfByteVec)));
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
    const ShortVec xi = (ShortVec)splat_int(x[i]);
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < kInt8Vectors; ++v) {
        sum[i][p][v] += dot_pairs(w[p][v], xi);
        PENSTOCK_NEEDED_NOW(sum[i][p][v]);
      }
  }
}

// Finishes a tile after the last part: sums times scales, plus the bias.
template <int R, int P>
PENSTOCK_INLINE void finish_int8_tile(const Int8Column& t, const float* row_scales,
                                      const IntVec (&sum)[R][P][kInt8Vectors], float* out) {
  for (int p = 0; p < P; ++p)
    for (int v = 0; v < kInt8Vectors; ++v) {
      const int8_t* header = t.header + p * t.panel_stride;
      const Vec scale = load_bytes<Vec>(header + v * sizeof(Vec));
      const Vec bias = t.bias == nullptr ? Vec{} : load(t.bias + p * t.out_panel_stride + v * kLanes);
      const IntVec excess = load_bytes<IntVec>(header + (kInt8Vectors + v) * sizeof(Vec));
      for (int i = 0; i < R; ++i) {
        Vec product = __builtin_convertvector(sum[i][p][v] - excess, Vec) * (scale * row_scales[i]);
        PENSTOCK_NEEDED_NOW(product);
        store(out + i * t.out_stride + p * t.out_panel_stride + v * kLanes, product + bias);
      }
    }
}

template <class Way, int R, int P>
static __attribute__((noinline)) void run_int8_tiles(const Int8Column& t) {
  constexpr int64_t kStepBytes = Way::kStep * kInt8Panel, kTurnLines = kInt8Unroll * kStepBytes / kCacheLine;
  static const float zeros[kInt8Panel] = {};
  const int64_t start_stride = t.is_first ? 0 : t.out_stride, start_panel_stride = t.is_first ? 0 : t.out_panel_stride;
  const char* next = t.next;
  for (int64_t tile = 0; tile < t.num_tiles; ++tile) {
    float* const out = t.out + tile * R * t.out_stride;
    const float* const start = t.is_first ? zeros : out;
    IntVec sum[R][P][kInt8Vectors];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < kInt8Vectors; ++v)
          sum[i][p][v] = (IntVec)load(start + i * start_stride + p * start_panel_stride + v * kLanes);
    const int32_t* x = t.x + tile * R * t.row_units;
    const int8_t* weight = t.weight;
    for (int64_t k = 0; k < t.steps; k += kInt8Unroll) {
      for (int line = 0; line < kTurnLines; ++line) __builtin_prefetch(next + line * t.next_step);
      next += kTurnLines * t.next_step;
#pragma GCC unroll 4
      for (int step = 0; step < kInt8Unroll; ++step)
        multiply_int8_step<R, P>(Way{}, x + step * R, weight + step * kStepBytes, t.panel_stride, sum);
      x += kInt8Unroll * R;
      weight += kInt8Unroll * kStepBytes;
    }
    if (t.is_last) {
      finish_int8_tile<R, P>(t, t.row_scales + tile * R, sum, out);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i)
        for (int p = 0; p < P; ++p)
          for (int v = 0; v < kInt8Vectors; ++v)
            store(out + i * t.out_stride + p * t.out_panel_stride + v * kLanes, (Vec)sum[i][p][v]);
    }
  }
}

// A single row takes several panels at once: several read streams give more memory bandwidth.
constexpr int64_t int8_panels_at_once(int64_t rows) { return rows == 1 ? 4 : 1; }

template <class Way>
static void multiply_int8(int64_t rows, int64_t panels, const Int8Column& t) {
  if (panels == 4) return run_int8_tiles<Way, 1, 4>(t);
  with_constant<Way::kTileRows>(rows, [&](auto r) { run_int8_tiles<Way, r, 1>(t); });
}

// Some panels times all rows of a chunk, into `out`, whose rows are out_stride apart; bias, out: of the first panel.
template <class Way>
static void multiply_int8_panels(const QuantizedLinearArgs& a, const QuantizedRows& x, int64_t rows,
                                 const Panels& panels, const float* bias, float* out, int64_t out_stride) {
  const int64_t depth = padded(a.shape.in_features);
  const int64_t panel_stride = panels.apart * int8_panel_bytes(a.shape.in_features);
  const int8_t* header = int8_panel(a.weight, a.shape.in_features, panels.first);
  const Tiles tiles(rows, Way::kTileRows);
  const int64_t block = tiles.count == 1 ? depth : kInt8Part / kInt8Panel;
  for (int64_t k = 0; k < depth; k += block) {
    const int64_t part = least(block, depth - k);
    const int8_t* weight = header + kInt8Header + k * kInt8Panel;
    // While the rows pass over this part, the next one is prefetched, a share by each tile; a single tile prefetches
    // its own weights PENSTOCK_AHEAD ahead.
    const char* const next =
        reinterpret_cast<const char*>(weight) + (tiles.count == 1 ? PENSTOCK_AHEAD : part * kInt8Panel);
    const int64_t next_step = divided_up(kCacheLine, tiles.count);
    Int8Column t{x.values + k / Way::kStep * (tiles.height + 1), x.units, x.scales, header, weight, panel_stride,
                 part / Way::kStep, bias, out, out_stride, panels.apart * kInt8Panel, k == 0, k + part == depth, next,
                 next_step, tiles.num_taller};
    if (t.num_tiles > 0) multiply_int8<Way>(tiles.height + 1, panels.count, t);
    const int64_t above = tiles.rows_of_taller();
    t.x = x.values + above * x.units + k / Way::kStep * tiles.height;
    t.row_scales += above;
    t.out += above * out_stride;
    t.next += tiles.num_taller * next_step * (part * kInt8Panel / kCacheLine);
    t.num_tiles = tiles.count - tiles.num_taller;
    multiply_int8<Way>(tiles.height, panels.count, t);
  }
}

PENSTOCK_INLINE int64_t int8_offset(int step, int64_t n, int64_t k) {
  return k / step * kInt8Panel * step + n * step + k % step;
}

static bool can_take_quads(const QuantizedPackArgs& a) {
  if (PENSTOCK_DOT_QUADS || !kHasQuads) return kHasQuads;
  const int64_t depth = a.shape.in_features;
  for (int64_t n = 0; n < a.shape.out_features; ++n) {
    const int8_t* values = a.values + n * depth;
    for (int64_t k = 0; k + 1 < depth; k += 2) {
      const int both = values[k] + values[k + 1];
      if (both > kMostOfNeighbours || both < -kMostOfNeighbours) return false;
    }
  }
  return true;
}

static void pack_int8(const QuantizedPackArgs& a) {
  const int64_t depth = a.shape.in_features, bytes = int8_panel_bytes(depth);
  int8_t* const start = static_cast<int8_t*>(a.packed);
  const Form form = can_take_quads(a) ? Form::kOffsetByte : Form::kShort;
  std::memset(start, 0, kCacheLine);
  *start = static_cast<int8_t>(form);
  int8_t* header = start + kCacheLine;
  for (int64_t first = 0; first < a.shape.out_features; first += kInt8Panel, header += bytes) {
    std::memset(header, 0, bytes);
    for (int64_t n = 0; n < kInt8Panel && first + n < a.shape.out_features; ++n) {
      const int8_t* values = a.values + (first + n) * depth;
      int32_t sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        header[kInt8Header + int8_offset(int8_step(form), n, k)] = values[k];
        sum += values[k];
      }
      std::memcpy(header + n * sizeof(float), a.scales + first + n, sizeof(float));
      sum *= 128;  // contribution of the offset 128 to the sum
      if (form == Form::kOffsetByte) std::memcpy(header + (kInt8Panel + n) * sizeof(float), &sum, sizeof sum);
    }
  }
}

static void unpack_int8(const QuantizedPackArgs& a) {
  const int64_t depth = a.shape.in_features;
  const int step = int8_step(int8_form(a.packed));
  for (int64_t n = 0; n < a.shape.out_features; ++n) {
    const int8_t* header = int8_panel(a.packed, depth, n / kInt8Panel);
    const int64_t column = n % kInt8Panel;
    std::memcpy(a.scales + n, header + column * sizeof(float), sizeof(float));
    for (int64_t k = 0; k < depth; ++k) a.values[n * depth + k] = header[kInt8Header + int8_offset(step, column, k)];
  }
}

static void read_int8_row(const QuantizedShape& shape, const void* weight, int64_t n, float* out) {
  const int8_t* header = int8_panel(weight, shape.in_features, n / kInt8Panel);
  const int step = int8_step(int8_form(weight));
  float scale;
  std::memcpy(&scale, header + n % kInt8Panel * sizeof(float), sizeof scale);
  for (int64_t k = 0; k < shape.in_features; ++k)
    out[k] = scale * header[kInt8Header + int8_offset(step, n % kInt8Panel, k)];
}

}  // namespace PENSTOCK_NAMESPACE
