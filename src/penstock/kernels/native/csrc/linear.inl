// Linear layers (GEMM) with weights packed in panels.
//
// Every output is one chain of FMAs over the inner dimension, from its first element to its last, whatever the number
// of rows, threads or tiles: a row's result is bit-exact alone and in any batch.
//
// Products in bfloat16 arithmetic are products of half the depth: an inner element is a pair of input features, and a
// link of the chain is `multiply_add_pairs`. Below, elements and in_features of such a product count pairs. Products by
// tiles have panels and blocks of their own (tile_products.inl).

namespace PENSTOCK_NAMESPACE {

constexpr int kPanel = PENSTOCK_PANEL_VECTORS * kLanes;
constexpr int kTileRows = PENSTOCK_TILE_ROWS;
// Inner elements per block: a panel's part of them, at most 32 KB, stays in the L1 or L2 cache while all rows pass over
// it.
template <class W>
constexpr int64_t kDepth = least(512, 32 * 1024 / (kPanel * sizeof(W)));
// Prefetch distance in bytes of a single tile of rows. Lines prefetched much further ahead would be evicted from the L1
// cache before use.
constexpr int64_t kFetchedAhead = 8 * 1024;
// Numbers of rows for which compute time is about equal to the weights' memory time: fewer rows are bound by memory
// alone, more rows by compute alone. A prefetch into L1 occupies one of its few line fill buffers until the line
// arrives, and demand loads must wait for one: so these prefetch into L2. Both limits are where that began and ceased
// to help, with AVX2 and with AVX-512 on a Zen 4 CPU.
constexpr bool is_bound_by_both(int64_t rows) { return rows > 6 && rows < 24; }
// Inner elements per loop iteration: branch predictors learn so short a loop.
constexpr int kUnroll = 8;
// Floats of rows that a thread multiplies with every panel: they should stay in the L2 cache.
constexpr int64_t kRowsInCache = 96 * 1024;

// Panels hold an inner element's weights contiguously: the first vector, then the second. bfloat16 weights alternate
// between the vectors, so that each pair is one lane, and widening a pair takes a shift and a mask.
static_assert(PENSTOCK_PANEL_VECTORS == 2, "panels are two vectors wide");

template <class W>
PENSTOCK_INLINE Vec load_one(const W* from, int v) {
  return load(from + v * kLanes);
}

// bfloat16 is the upper half of a float.
PENSTOCK_INLINE Vec load_one(const Bfloat16* from, int v) {
  UintVec pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  return v == 0 ? (Vec)(pairs << 16) : (Vec)(pairs & 0xffff0000u);
}

template <class W>
constexpr bool kIsPair = false;
template <>
constexpr bool kIsPair<Bfloat16Pair> = true;
template <class W>
constexpr bool kIsTilePair = false;
template <>
constexpr bool kIsTilePair<TilePair> = true;

// Output features of a panel.
template <class W>
constexpr int64_t kPanelOf = kIsTilePair<W> ? kTilePanel : kPanel;
PENSTOCK_INLINE int64_t panel_width(WeightType type) {
  return type == WeightType::kBfloat16Tiles ? kTilePanel : kPanel;
}

// Operations on an inner element of rows and weights of type W.
template <class W>
PENSTOCK_INLINE Vec splat_element(const float* x) {
  if constexpr (kIsPair<W>) return splat_pair(x);
  else return splat(*x);
}
template <class W>
PENSTOCK_INLINE void add_product(Vec& sum, Vec x, Vec w) {
  if constexpr (kIsPair<W>) multiply_add_pairs(sum, x, w);
  else multiply_add(sum, x, w);
}

// Index of a panel column's weight among the weights of an inner element.
template <class W>
constexpr int64_t place_in_panel(int64_t column) {
  return column;
}
template <>
constexpr int64_t place_in_panel<Bfloat16>(int64_t column) {
  return 2 * (column % kLanes) + column / kLanes;
}

// Tiles of R rows by P panels, one below the other: out += x * weight over `depth` inner elements.
//
// weight: panels `panel_stride` apart. out: row i, panel p at out + i * out_stride + p * out_panel_stride; starts from
// zero if `is_first`. fetch: memory to prefetch meanwhile, with a panel alone. bytes_ahead: distance at which each of
// several panels is prefetched; 0 for none.
template <class W>
struct TileColumn {
  const float* x;
  int64_t x_stride;
  const W* weight;
  int64_t panel_stride, depth;
  float* out;
  int64_t out_stride, out_panel_stride;
  bool is_first;
  Fetch fetch;
  int64_t bytes_ahead, num_tiles;
};

// Otherwise compilers precompute every sum of a stride and a step, more of them than there are registers.
PENSTOCK_INLINE void keep_apart(const float*& pointer) { asm("" : "+r"(pointer)); }

// Consecutive inner elements of one panel before the next panel: a cache line of weights for a single row, so that
// lines are read one after the other.
template <class W>
constexpr int steps_at_once(int rows, int panels) {
  constexpr int64_t kStepsOfLine = kCacheLine / (kPanel * sizeof(W));
  return rows == 1 && panels > 1 && kStepsOfLine > 1 ? kStepsOfLine : 1;
}

// K inner elements from k on.
template <int R, int P, int K, class W>
PENSTOCK_INLINE void multiply_steps(const float* const (&x)[R], int k, const W* weight, int64_t panel_stride,
                                    Vec (&sum)[R][P][2]) {
  // The more numerous operands are loaded when needed: the accumulators occupy the registers.
  if constexpr (P == 1) {
    static_assert(K == 1, "a panel alone goes from element to element");
    Vec w[2];
    for (int v = 0; v < 2; ++v) w[v] = load_one(weight + k * kPanel, v);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const Vec xi = splat_element<W>(x[i] + k);
      for (int v = 0; v < 2; ++v) add_product<W>(sum[i][0][v], xi, w[v]);
    }
  } else {
    Vec xs[R][K];
    for (int i = 0; i < R; ++i)
      for (int step = 0; step < K; ++step) xs[i][step] = splat_element<W>(x[i] + k + step);
    for (int p = 0; p < P; ++p)
      for (int step = 0; step < K; ++step)
        for (int v = 0; v < 2; ++v) {
          const Vec w = load_one(weight + p * panel_stride + (k + step) * kPanel, v);
          for (int i = 0; i < R; ++i) add_product<W>(sum[i][p][v], xs[i][step], w);
        }
  }
}

template <int R, int P, class W>
static __attribute__((noinline)) void run_tiles(const TileColumn<W>& t) {
  constexpr int kSteps = steps_at_once<W>(R, P);
  static const float zeros[kPanel] = {};
  const int64_t start_stride = t.is_first ? 0 : t.out_stride, start_panel_stride = t.is_first ? 0 : t.out_panel_stride;
  float* out = t.out;
  Fetch fetch = t.fetch;
  for (int64_t tile = 0; tile < t.num_tiles; ++tile, out += R * t.out_stride) {
    const float* x[R];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      x[i] = t.x + (tile * R + i) * t.x_stride;
      keep_apart(x[i]);
    }
    Vec sum[R][P][2];
    const float* start = t.is_first ? zeros : out;
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < 2; ++v) sum[i][p][v] = load(start + i * start_stride + p * start_panel_stride + v * kLanes);

    const W* weight = t.weight;
    int64_t left = t.depth;
    for (; left >= kUnroll; left -= kUnroll, weight += kUnroll * kPanel) {
      fetch.turn();
      if (P > 1 && t.bytes_ahead > 0)
        for (int p = 0; p < P; ++p)
          for (int64_t at = 0; at < kUnroll * kPanel * int64_t{sizeof(W)}; at += kCacheLine)
            __builtin_prefetch(reinterpret_cast<const char*>(weight + p * t.panel_stride) + t.bytes_ahead + at, 0, 3);
#pragma GCC unroll 8
      for (int k = 0; k < kUnroll; k += kSteps) multiply_steps<R, P, kSteps>(x, k, weight, t.panel_stride, sum);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        x[i] += kUnroll;
        keep_apart(x[i]);
      }
    }
    for (; left > 0; --left, weight += kPanel) {
      multiply_steps<R, P, 1>(x, 0, weight, t.panel_stride, sum);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) ++x[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < 2; ++v) store(out + i * t.out_stride + p * t.out_panel_stride + v * kLanes, sum[i][p][v]);
  }
}

// Few rows take several panels at once: a single chain of additions per vector would be bound by latency. Products of
// pairs take half the instructions, so that more rows are bound by memory, which several streams read faster.
constexpr int panels_at_once(int64_t rows, bool are_pairs) {
  if (kHasPairProducts && are_pairs) return rows <= 3 ? 4 : rows == 4 ? 3 : rows <= 6 ? 2 : 1;
  return rows == 1 ? 4 : rows == 2 ? 3 : rows == 3 ? 2 : 1;
}

template <class W>
static void multiply(int64_t rows, int64_t panels, const TileColumn<W>& t) {
  with_constant<kTileRows>(rows, [&](auto r) {
    with_constant<panels_at_once(r, kIsPair<W>)>(panels, [&](auto p) { run_tiles<r, p, W>(t); });
  });
}

template <class W>
PENSTOCK_INLINE void multiply_column(const Tiles& tiles, int64_t panels, TileColumn<W> t) {
  if (tiles.num_taller > 0) {
    const int64_t rows = tiles.rows_of_taller();
    t.num_tiles = tiles.num_taller;
    multiply<W>(tiles.height + 1, panels, t);
    t.x += rows * t.x_stride;
    t.out += rows * t.out_stride;
    t.fetch.skip(tiles.num_taller * (t.depth / kUnroll));
  }
  t.num_tiles = tiles.count - tiles.num_taller;
  multiply<W>(tiles.height, panels, t);
}

// Panels that so many rows take at once.
PENSTOCK_INLINE int64_t num_streams(int64_t rows, bool are_pairs) {
  const int64_t most = panels_at_once(rows, are_pairs);
  return rows == 1 ? least(most, stream_choices.of_one_row) : most;
}

// Some panels, all of them full, times a chunk of rows. out: of the first panel; panels are `out_panel_stride` apart.
template <class W>
static void multiply_panels(const LinearArgs& a, int64_t first_row, int64_t rows, const Panels& panels, float* out,
                            int64_t out_panel_stride) {
  const int64_t depth = a.in_features, panel_stride = depth * kPanel * panels.apart;
  const Tiles tiles(rows, kTileRows);
  const bool is_single = tiles.count == 1, is_near = !is_bound_by_both(rows);
  const int64_t most_at_once = is_single ? num_streams(rows, kIsPair<W>) : 1;
  const int64_t block = is_single ? depth : kDepth<W>;
  for (int64_t done = 0, at_once; done < panels.count; done += at_once) {
    at_once = least(most_at_once, panels.count - done);
    const W* const panel = static_cast<const W*>(a.weight) + panels.first * depth * kPanel + done * panel_stride;
    for (int64_t k = 0; k < depth; k += block) {
      const int64_t part = least(block, depth - k);
      const W* weight = panel + k * kPanel;
      // While several tiles pass over one part of a panel, the next part is prefetched; a single tile prefetches its
      // own weights kFetchedAhead ahead. Several panels at once are several read streams, which some processors
      // prefetch well enough.
      const int64_t bytes = part * kPanel * static_cast<int64_t>(sizeof(W));
      const int64_t turns = tiles.count * divided_up(part, kUnroll);
      const char* const fetched = reinterpret_cast<const char*>(weight) + (is_single ? kFetchedAhead : bytes);
      const Fetch fetch = at_once > 1 ? fetch_nothing() : fetch_in_turns(fetched, bytes, turns, is_near);
      multiply_column<W>(tiles, at_once,
                         {a.x + first_row * a.x_stride + k, a.x_stride, weight, panel_stride, part,
                          out + done * out_panel_stride, a.out_stride, out_panel_stride, k == 0, fetch,
                          stream_choices.bytes_ahead, 0});
    }
  }
}

// The partial panel goes through a buffer: its padding must not reach the output.
template <class W>
static void multiply_edge(const LinearArgs& a, int64_t first_row, int64_t rows) {
  const int64_t panel = a.out_features / kPanel, columns = a.out_features % kPanel;
  const W* weight = static_cast<const W*>(a.weight) + panel * a.in_features * kPanel;
  float edge[kTileRows * kPanel];
  for (int64_t start = 0; start < rows; start += kTileRows) {
    const int64_t height = least(kTileRows, rows - start);
    const float* x = a.x + (first_row + start) * a.x_stride;
    multiply<W>(height, 1, {x, a.x_stride, weight, 0, a.in_features, edge, kPanel, 0, true, fetch_nothing(), 0, 1});
    float* out = a.out + (first_row + start) * a.out_stride + panel * kPanel;
    for (int i = 0; i < height; ++i) std::memcpy(out + i * a.out_stride, edge + i * kPanel, columns * sizeof(float));
  }
}

PENSTOCK_INLINE TileRows rounded_tiles(const LinearArgs& a, int64_t first_row, int64_t rows) {
  return TileRows::rounded(a.x + first_row * a.x_stride, RowTiles(rows).height, a.in_features);
}

template <>
void multiply_panels<TilePair>(const LinearArgs& a, int64_t first_row, int64_t rows, const Panels& panels, float* out,
                               int64_t out_panel_stride) {
  multiply_tile_panels(a, rounded_tiles(a, first_row, rows), rows, panels, out, out_panel_stride);
}

template <>
void multiply_edge<TilePair>(const LinearArgs& a, int64_t first_row, int64_t rows) {
  multiply_tile_edge(a, rounded_tiles(a, first_row, rows), first_row, rows);
}

static void add_bias(const LinearArgs& a, int64_t first_row, int64_t rows, const Panels& panels) {
  const int64_t width = panel_width(a.weight_type);
  for (int64_t row = first_row; row < first_row + rows; ++row) {
    float* out = a.out + row * a.out_stride;
    for (int64_t i = 0; i < panels.count; ++i) {
      const int64_t begin = panels.at(i) * width;
      for (int64_t n = begin; n < least(begin + width, a.out_features); ++n) out[n] += a.bias[n];
    }
  }
}

// Rows per chunk: chunks of nearly the same size, in whole tiles.
static int64_t rows_at_once(const LinearArgs& a) {
  const bool are_tiles = a.weight_type == WeightType::kBfloat16Tiles;
  const int64_t unit = are_tiles ? kBlockRows : kTileRows;
  const int64_t fitting = (are_tiles ? tile_choices.row_bytes / int64_t{sizeof(TilePair)} : kRowsInCache) / a.in_features;
  const int64_t most = fitting < 8 * unit ? 8 * unit : fitting;
  return divided_up(divided_up(a.rows, divided_up(a.rows, most)), unit) * unit;
}

// Rows a multiple of so many floats apart map to the same few sets of the L1 cache.
constexpr int64_t kCrowdedStride = 1024;
constexpr int64_t kRowsApart = 16;

// Copies a chunk of rows to a stride without cache set conflicts. Each thread has its own copy: that costs less than a
// barrier, and the copy is in the core's own cache.
static LinearArgs spread_rows(const LinearArgs& a, int64_t first_row, int64_t rows) {
  static thread_local Scratch scratch;
  LinearArgs spread = a;
  if (a.x_stride % kCrowdedStride != 0 || rows <= 2 * kTileRows) return spread;
  const int64_t stride = a.in_features + kRowsApart;
  float* memory = scratch.get(static_cast<size_t>(rows * stride));
  if (memory == nullptr) return spread;  // correct, but slower
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(memory + row * stride, a.x + (first_row + row) * a.x_stride, a.in_features * sizeof(float));
  spread.x = memory - first_row * stride;
  spread.x_stride = stride;
  return spread;
}

// Elements from a rounded row to the next: whole cache lines, and no stride that crowds a cache set.
PENSTOCK_INLINE int64_t rounded_stride(int64_t in_features) {
  return divided_up(in_features, kRowsApart) * kRowsApart + kRowsApart;
}

// Floats that a chunk of rows takes as a thread multiplies it, for bfloat16 arithmetic; 0 for other weights.
PENSTOCK_INLINE int64_t rounded_floats(const LinearArgs& a, int64_t rows) {
  if (a.weight_type == WeightType::kBfloat16Pairs) return rows * rounded_stride(a.in_features);
  if (a.weight_type != WeightType::kBfloat16Tiles) return 0;
  const RowTiles tiles(rows);
  return tiles.count * tiles.height * padded_pairs(a.in_features);
}

// Rounds a chunk of rows to bfloat16 pairs. Each thread has its own copy, for the same reasons.
static LinearArgs round_rows(const LinearArgs& a, int64_t first_row, int64_t rows, float* memory) {
  LinearArgs rounded = a;
  rounded.x_stride = rounded_stride(a.in_features);
  rounded.x = memory - first_row * rounded.x_stride;
  for (int64_t row = 0; row < rows; ++row)
    round_row(a.x + (first_row + row) * a.x_stride, a.in_features,
              reinterpret_cast<Bfloat16Pair*>(memory + row * rounded.x_stride));
  return rounded;
}

// Calls run(W{}) for the type of a weight.
template <class Function>
static auto with_type(WeightType type, const Function& run) {
  switch (type) {
    case WeightType::kFloat32: return run(float{});
    case WeightType::kBfloat16: return run(Bfloat16{});
    case WeightType::kFloat16: return run(Float16{});
    case WeightType::kBfloat16Tiles: return run(TilePair{});
    default: return run(Bfloat16Pair{});
  }
}

// Multiply-adds per turn of a thread: a microsecond's worth, many times the cost of taking a turn. At the end a thread
// waits for half a turn of another thread on average.
constexpr int64_t kProductsPerTurn = 64 * 1024;
constexpr int64_t kPanelsPerTurn = 4;

// Division of a product into chunks of rows times panels, the last of which may be partial. Each thread has a share of
// the panels, for all rows; in streams where a few rows take several panels at once.
struct PanelShares {
  Shares shares;
  int64_t chunk_rows, num_panels, panels_each, num_chunks, panels_per_turn;
  PanelStreams streams{0, 1, 1};
  bool has_streams;
  float* rounded;  // memory for rounded rows, if the product has them: a chunk for each thread, or all chunks for all
  int64_t floats_each;
  bool rounds_together;

  // most_panels: per turn of a thread. False when allocation fails.
  bool divide(const LinearArgs& a, int64_t most_panels, Scratch& scratch) {
    chunk_rows = rows_at_once(a);
    const bool are_tiles = a.weight_type == WeightType::kBfloat16Tiles;
    rounds_together = are_tiles && a.num_threads > 1 && a.rows > kTileHeight;
    num_chunks = divided_up(a.rows, chunk_rows);
    floats_each = rounded_floats(a, least(chunk_rows, a.rows));
    const size_t floats = Shares::floats_for(a.num_threads);
    const int64_t copies = rounds_together ? num_chunks : a.num_threads;
    float* memory = scratch.get(floats + static_cast<size_t>(copies * floats_each));
    if (memory == nullptr) return false;
    rounded = memory + floats;
    const int64_t width = panel_width(a.weight_type);
    num_panels = divided_up(a.out_features, width);
    panels_each = divided_up(num_panels, a.num_threads);
    const int64_t products = least(chunk_rows, a.rows) * a.in_features * width;
    panels_per_turn = least(divided_up(are_tiles ? tile_choices.products_per_turn : kProductsPerTurn, products), most_panels);
    const bool are_pairs = a.weight_type == WeightType::kBfloat16Pairs;
    const int64_t at_once = are_tiles ? tile_panels_at_once(a.rows) : num_streams(a.rows, are_pairs);
    streams = {num_panels, a.num_threads, at_once};
    has_streams = at_once > 1;
    shares.divide(memory, a.num_threads, has_streams ? streams.turns_each() : num_chunks * panels_each);
    return true;
  }

  // Before the first turn. Many rows in tiles are rounded by all threads together: products by tiles take so little
  // time that a copy of each thread would cost more than the barrier.
  template <class W>
  void round_rows_together(const LinearArgs& a, int thread, const Team& team) const {
    if constexpr (kIsTilePair<W>) {
      if (!rounds_together) return;
      for (int64_t chunk = 0, taken = 0; chunk < num_chunks; ++chunk) {
        const int64_t first = chunk * chunk_rows, rows = least(chunk_rows, a.rows - first);
        for (int64_t tile = 0; tile < RowTiles(rows).count; ++tile, ++taken)
          if (taken % team.num_threads == thread) round_tile(a, first, rows, tile, rounded + chunk * floats_each);
      }
      team.barrier();
    }
  }

  // A chunk of rows in the form in which a thread multiplies them.
  template <class W>
  LinearArgs prepare_rows(const LinearArgs& a, int thread, int64_t first_row, int64_t rows) const {
    float* const memory = rounded + (rounds_together ? first_row / chunk_rows : thread) * floats_each;
    if constexpr (kIsTilePair<W>) {
      LinearArgs prepared = a;
      prepared.x_stride = padded_pairs(a.in_features);
      prepared.x = memory - first_row * prepared.x_stride;
      if (!rounds_together)
        for (int64_t tile = 0; tile < RowTiles(rows).count; ++tile) round_tile(a, first_row, rows, tile, memory);
      return prepared;
    } else if constexpr (kIsPair<W>) {
      return round_rows(a, first_row, rows, memory);
    } else {
      return spread_rows(a, first_row, rows);
    }
  }

  // A tile of a chunk of rows.
  static void round_tile(const LinearArgs& a, int64_t first_row, int64_t rows, int64_t tile, float* memory) {
    const int64_t height = RowTiles(rows).height, start = tile * height;
    auto* const to = reinterpret_cast<TilePair*>(memory) + start * padded_pairs(a.in_features);
    const float* const x = a.x + (first_row + start) * a.x_stride;
    round_to_tile(x, a.x_stride, least(height, rows - start), height, a.in_features, to);
  }

  struct Turn {
    int64_t chunk;
    Panels panels;
  };

  // Calls run(Turn) for every turn of this thread.
  template <class Function>
  void take_turns(int thread, const Function& run) {
    Shares::Pieces taken;
    while (shares.take(thread, has_streams ? 1 : panels_per_turn, taken)) {
      if (has_streams) {
        const Panels panels = streams.at(taken.begin);
        if (panels.count > 0) run(Turn{0, panels});
        continue;
      }
      for (int64_t next; taken.begin < taken.end; taken.begin = next) {
        const int64_t share = taken.begin / panels_each;  // of one thread and one chunk
        next = least(taken.end, (share + 1) * panels_each);
        const int64_t before = share / num_chunks * panels_each - share * panels_each;
        const int64_t first = taken.begin + before, count = least(next + before, num_panels) - first;
        if (count > 0) run(Turn{share % num_chunks, {first, count, 1}});  // the last threads may have less than a share
      }
    }
  }
};

struct LinearJob {
  const LinearArgs* args;
  PanelShares panels;
};

template <class W>
static void linear_thread(void* data, int thread, const Team& team) {
  auto& job = *static_cast<LinearJob*>(data);
  const LinearArgs& a = *job.args;
  constexpr int64_t kWidth = kPanelOf<W>;
  const int64_t full_panels = a.out_features / kWidth, at_once = job.panels.chunk_rows;
  LinearArgs spread = a;
  int64_t chunk = -1;
  job.panels.round_rows_together<W>(a, thread, team);
  job.panels.take_turns(thread, [&](const PanelShares::Turn& turn) {
    const int64_t first = turn.chunk * at_once, rows = least(at_once, a.rows - first);
    if (turn.chunk != chunk) spread = job.panels.prepare_rows<W>(a, thread, first, rows);
    chunk = turn.chunk;
    bool has_edge;
    const Panels full = turn.panels.without(full_panels, has_edge);
    float* const out = a.out + first * a.out_stride + full.first * kWidth;
    multiply_panels<W>(spread, first, rows, full, out, full.apart * kWidth);
    if (has_edge) multiply_edge<W>(spread, first, rows);
    if (a.bias != nullptr) add_bias(a, first, rows, turn.panels);
  });
}

PENSTOCK_INLINE int64_t elements(int64_t in_features, WeightType type) {
  return type == WeightType::kBfloat16Pairs || type == WeightType::kBfloat16Tiles ? in_features / 2 : in_features;
}

static LinearArgs in_elements(const LinearArgs& args) {
  LinearArgs a = args;
  a.in_features = elements(a.in_features, a.weight_type);
  return a;
}

template <class W>
static bool linear_of(const LinearArgs& args) {
  if (args.rows == 0) return true;
  static thread_local Scratch scratch;
  const LinearArgs a = in_elements(args);
  LinearJob job{&a, {}};
  if (!job.panels.divide(a, kPanelsPerTurn, scratch)) return false;
  run_parallel(a.num_threads, linear_thread<W>, &job);
  return true;
}

static bool linear(const LinearArgs& a) {
  return with_type(a.weight_type, [&](auto w) { return linear_of<decltype(w)>(a); });
}

}  // namespace PENSTOCK_NAMESPACE
