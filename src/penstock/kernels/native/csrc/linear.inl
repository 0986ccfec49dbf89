// Matrix products with weights packed in panels.
//
// Every output is one chain of fused multiply-adds over the inner dimension, from its first element to its last,
// whatever the number of rows, threads or tiles: so a row's result has the same bits alone and in any batch.

namespace PENSTOCK_NAMESPACE {

constexpr int kPanel = PENSTOCK_PANEL_VECTORS * kLanes;
constexpr int kTileRows = PENSTOCK_TILE_ROWS;
// Inner elements taken at a time, so that a panel's part stays in a near cache while all rows pass over it.
constexpr int64_t kDepth = 512;
// Floats of packed rows that a thread goes over for every panel: they should stay in the second-level cache.
constexpr int64_t kRowsInCache = 96 * 1024;

// Panels hold an inner element's weights side by side: the first vector's, then the second's. Those of bfloat16 alternate
// between the vectors, so that each pair is one lane, and widening a pair takes a shift and a mask.
static_assert(PENSTOCK_PANEL_VECTORS == 2, "panels are two vectors wide");

template <class W>
PENSTOCK_INLINE void load_pair(const W* from, Vec (&w)[2]) {
  w[0] = load(from);
  w[1] = load(from + kLanes);
}

// bfloat16 is the upper half of a float.
PENSTOCK_INLINE void load_pair(const Bfloat16* from, Vec (&w)[2]) {
  UintVec pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  w[0] = (Vec)(pairs << 16);
  w[1] = (Vec)(pairs & 0xffff0000u);
}

// Where the weight of a panel's column lies among those of an inner element.
template <class W>
constexpr int64_t place_in_panel(int64_t column) {
  return column;
}
template <>
constexpr int64_t place_in_panel<Bfloat16>(int64_t column) {
  return 2 * (column % kLanes) + column / kLanes;
}

// A tile of R rows by P panels: out += x * weight over `depth` inner elements.
//
// x: packed, [depth][R]. weight: panels `panel_stride` apart. out: row i, panel p at out + i * out_stride + p * kPanel;
// started from zero if `is_first`. next: memory to fetch into the cache meanwhile, `next_step` bytes per element.
template <int R, int P, class W>
PENSTOCK_INLINE void multiply_tile(const float* x, const W* weight, int64_t panel_stride, int64_t depth, float* out,
                                   int64_t out_stride, bool is_first, const char* next, int64_t next_step) {
  constexpr int V = PENSTOCK_PANEL_VECTORS;
  Vec sum[R][P][V];
  for (int i = 0; i < R; ++i)
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < V; ++v)
        sum[i][p][v] = is_first ? Vec{} : load(out + i * out_stride + p * kPanel + v * kLanes);
  for (int64_t k = 0; k < depth; ++k) {
    __builtin_prefetch(next + k * next_step, 0, 2);  // into the second-level cache: the first is full
    Vec w[P][V];
    for (int p = 0; p < P; ++p) load_pair(weight + p * panel_stride + k * kPanel, w[p]);
    for (int i = 0; i < R; ++i) {
      const Vec xi = splat(x[k * R + i]);
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < V; ++v) sum[i][p][v] += xi * w[p][v];
    }
  }
  for (int i = 0; i < R; ++i)
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < V; ++v) store(out + i * out_stride + p * kPanel + v * kLanes, sum[i][p][v]);
}

template <class W>
struct TileArgs {
  const float* x;
  const W* weight;
  int64_t panel_stride, depth;
  float* out;
  int64_t out_stride;
  bool is_first;
  const char* next;
  int64_t next_step;
};

template <int R, int P, class W>
static __attribute__((noinline)) void run_tile(const TileArgs<W>& t) {
  multiply_tile<R, P, W>(t.x, t.weight, t.panel_stride, t.depth, t.out, t.out_stride, t.is_first, t.next, t.next_step);
}

// Few rows take several panels at once: a single chain of additions per vector would wait for itself.
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 3 : rows == 3 ? 2 : 1; }

template <class W, int P>
PENSTOCK_INLINE void dispatch_rows(int rows, const TileArgs<W>& t) {
  switch (rows) {
    case 1: return run_tile<1, P, W>(t);
    case 2: return run_tile<2, P < 4 ? P : 3, W>(t);
    case 3: return run_tile<3, P < 3 ? P : 2, W>(t);
    case 4: return run_tile<4, 1, W>(t);
    case 5: return run_tile<5, 1, W>(t);
#if PENSTOCK_TILE_ROWS > 6
    case 6: return run_tile<6, 1, W>(t);
    case 7: return run_tile<7, 1, W>(t);
    case 8: return run_tile<8, 1, W>(t);
    case 9: return run_tile<9, 1, W>(t);
    case 10: return run_tile<10, 1, W>(t);
    case 11: return run_tile<11, 1, W>(t);
#endif
    default: return run_tile<kTileRows, 1, W>(t);
  }
}

template <class W>
static void multiply(int rows, int panels, const TileArgs<W>& t) {
  switch (panels) {
    case 4: return dispatch_rows<W, 4>(rows, t);
    case 3: return dispatch_rows<W, 3>(rows, t);
    case 2: return dispatch_rows<W, 2>(rows, t);
    default: return dispatch_rows<W, 1>(rows, t);
  }
}

// Rows `first` .. of x as tiles of [in_features][tile rows]. Threads share the tiles.
static void pack_rows(const LinearArgs& a, int64_t first, int64_t rows, float* packed, int thread, int num_threads) {
  const int64_t depth = a.in_features;
  for (int64_t tile = thread; tile * kTileRows < rows; tile += num_threads) {
    const int64_t start = tile * kTileRows;
    const int64_t height = rows - start < kTileRows ? rows - start : kTileRows;
    const float* from = a.x + (first + start) * a.x_stride;
    float* to = packed + start * depth;
    if (height == kTileRows) {
      for (int64_t k = 0; k < depth; ++k)
        for (int i = 0; i < kTileRows; ++i) to[k * kTileRows + i] = from[i * a.x_stride + k];
    } else {
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t i = 0; i < height; ++i) to[k * height + i] = from[i * a.x_stride + k];
    }
  }
}

// The panel that is not full goes through a buffer: its padding must not reach the output.
template <class W>
static void multiply_edge(const LinearArgs& a, const float* packed, int64_t first_row, int64_t rows) {
  const int64_t panel = a.out_features / kPanel, columns = a.out_features % kPanel;
  const W* weight = static_cast<const W*>(a.weight) + panel * a.in_features * kPanel;
  float edge[kTileRows * kPanel];
  for (int64_t start = 0; start < rows; start += kTileRows) {
    const int height = static_cast<int>(rows - start < kTileRows ? rows - start : kTileRows);
    const char* next = reinterpret_cast<const char*>(weight);
    multiply<W>(height, 1, {packed + start * a.in_features, weight, 0, a.in_features, edge, kPanel, true, next, 0});
    float* out = a.out + (first_row + start) * a.out_stride + panel * kPanel;
    for (int i = 0; i < height; ++i) std::memcpy(out + i * a.out_stride, edge + i * kPanel, columns * sizeof(float));
  }
}

// Panels first_panel .. last_panel, all of them full, times a chunk of packed rows.
template <class W>
static void multiply_panels(const LinearArgs& a, const float* packed, int64_t first_row, int64_t rows,
                            int64_t first_panel, int64_t last_panel) {
  const int64_t depth = a.in_features, panel_stride = depth * kPanel;
  const int64_t num_tiles = (rows + kTileRows - 1) / kTileRows;
  const int at_once = num_tiles == 1 ? panels_at_once(static_cast<int>(rows)) : 1;
  const int64_t block = num_tiles == 1 ? depth : kDepth;
  // While the rows pass over one part of a panel, the part after it is fetched, a share of it by each tile.
  const int64_t bytes_per_element = kPanel * static_cast<int64_t>(sizeof(W));
  const int64_t step = num_tiles == 1 ? 0 : (bytes_per_element + num_tiles - 1) / num_tiles;

  for (int64_t panel = first_panel; panel < last_panel;) {
    const int panels = static_cast<int>(last_panel - panel < at_once ? last_panel - panel : at_once);
    for (int64_t k = 0; k < depth; k += block) {
      const int64_t part = depth - k < block ? depth - k : block;
      const W* weight = static_cast<const W*>(a.weight) + panel * panel_stride + k * kPanel;
      const char* next = reinterpret_cast<const char*>(weight + part * kPanel);
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t start = tile * kTileRows;
        const int height = static_cast<int>(rows - start < kTileRows ? rows - start : kTileRows);
        multiply<W>(height, panels,
                    {packed + start * depth + k * height, weight, panel_stride, part,
                     a.out + (first_row + start) * a.out_stride + panel * kPanel, a.out_stride, k == 0,
                     next + tile * step * part, step});
      }
    }
    panel += panels;
  }
}

static void add_bias(const LinearArgs& a, int64_t first_row, int64_t rows, int64_t begin, int64_t end) {
  for (int64_t row = first_row; row < first_row + rows; ++row) {
    float* out = a.out + row * a.out_stride;
    for (int64_t n = begin; n < end; ++n) out[n] += a.bias[n];
  }
}

template <class Function>
static Function for_type(WeightType type, Function float32, Function bfloat16, Function float16) {
  return type == WeightType::kFloat32 ? float32 : type == WeightType::kBfloat16 ? bfloat16 : float16;
}

struct LinearJob {
  const LinearArgs* args;
  float* packed;
  int64_t rows_at_once;
};

template <class W>
static void linear_thread(void* data, int thread, const Team& team) {
  const auto& job = *static_cast<const LinearJob*>(data);
  const LinearArgs& a = *job.args;
  const int64_t full_panels = a.out_features / kPanel;
  const int64_t begin = full_panels * thread / team.num_threads, end = full_panels * (thread + 1) / team.num_threads;
  const bool has_edge = thread == team.num_threads - 1 && a.out_features % kPanel != 0;
  for (int64_t first = 0; first < a.rows; first += job.rows_at_once) {
    const int64_t rows = a.rows - first < job.rows_at_once ? a.rows - first : job.rows_at_once;
    const float* packed = job.packed;
    if (packed == nullptr) {
      packed = a.x;  // a single row lies as it would be packed
    } else {
      if (first != 0) team.barrier();  // others may still read the rows before these
      pack_rows(a, first, rows, job.packed, thread, team.num_threads);
      team.barrier();
    }
    multiply_panels<W>(a, packed, first, rows, begin, end);
    if (has_edge) multiply_edge<W>(a, packed, first, rows);
    if (a.bias != nullptr) add_bias(a, first, rows, begin * kPanel, has_edge ? a.out_features : end * kPanel);
  }
}

static bool linear(const LinearArgs& a) {
  if (a.rows == 0) return true;
  int64_t rows_at_once = kRowsInCache / a.in_features / kTileRows * kTileRows;
  if (rows_at_once < 4 * kTileRows) rows_at_once = 4 * kTileRows;
  if (rows_at_once > a.rows) rows_at_once = a.rows;
  static thread_local Scratch scratch;
  LinearJob job{&a, nullptr, rows_at_once};
  if (a.rows > 1) {
    job.packed = scratch.get(static_cast<size_t>(rows_at_once * a.in_features));
    if (job.packed == nullptr) return false;
  }
  run_parallel(a.num_threads,
               for_type(a.weight_type, linear_thread<float>, linear_thread<Bfloat16>, linear_thread<Float16>), &job);
  return true;
}

template <class W>
static void pack_panels(const void* from, int64_t out_features, int64_t in_features, void* to) {
  const W* weight = static_cast<const W*>(from);
  W* packed = static_cast<W*>(to);
  for (int64_t first = 0; first < out_features; first += kPanel, packed += in_features * kPanel)
    for (int64_t k = 0; k < in_features; ++k)
      for (int64_t n = 0; n < kPanel; ++n)
        packed[k * kPanel + place_in_panel<W>(n)] =
            first + n < out_features ? weight[(first + n) * in_features + k] : W{};
}

template <class W>
PENSTOCK_INLINE int64_t place(int64_t n, int64_t k, int64_t in_features) {
  return n / kPanel * in_features * kPanel + k * kPanel + place_in_panel<W>(n % kPanel);
}

template <class W>
static void unpack_panels(const void* from, int64_t out_features, int64_t in_features, void* to) {
  const W* packed = static_cast<const W*>(from);
  W* weight = static_cast<W*>(to);
  for (int64_t n = 0; n < out_features; ++n)
    for (int64_t k = 0; k < in_features; ++k) weight[n * in_features + k] = packed[place<W>(n, k, in_features)];
}

PENSTOCK_INLINE float widen(float x) { return x; }
PENSTOCK_INLINE float widen(Bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
PENSTOCK_INLINE float widen(Float16 x) {
  Float16 lanes[kLanes] = {x};
  return load(lanes)[0];
}

template <class W>
static void rows_thread(void* data, int thread, const Team& team) {
  const auto& a = *static_cast<const RowsArgs*>(data);
  const int64_t begin = a.num_ids * thread / team.num_threads, end = a.num_ids * (thread + 1) / team.num_threads;
  for (int64_t i = begin; i < end; ++i) {
    const W* column = static_cast<const W*>(a.weight) + place<W>(a.ids[i], 0, a.in_features);
    for (int64_t k = 0; k < a.in_features; ++k) a.out[i * a.in_features + k] = widen(column[k * kPanel]);
  }
}

static void rows(const RowsArgs& a) {
  RowsArgs args = a;
  run_parallel(a.num_ids < 4 ? 1 : a.num_threads,
               for_type(a.weight_type, rows_thread<float>, rows_thread<Bfloat16>, rows_thread<Float16>), &args);
}

static void pack_weight(const void* weight, int64_t out_features, int64_t in_features, WeightType type, void* packed) {
  auto pack = for_type(type, pack_panels<float>, pack_panels<Bfloat16>, pack_panels<Float16>);
  pack(weight, out_features, in_features, packed);
}

static void unpack_weight(const void* packed, int64_t out_features, int64_t in_features, WeightType type, void* weight) {
  auto unpack = for_type(type, unpack_panels<float>, unpack_panels<Bfloat16>, unpack_panels<Float16>);
  unpack(packed, out_features, in_features, weight);
}

}  // namespace PENSTOCK_NAMESPACE
