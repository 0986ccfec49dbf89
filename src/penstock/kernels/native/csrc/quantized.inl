// All quantised kernels of one instruction set, and their table.
//
// The including file defines the macros of simd.h, PENSTOCK_QUANTIZED_TILE_ROWS, and PENSTOCK_DOT_QUADS: whether the
// instruction set has a dot product of four bytes (VNNI).

#include "simd.h"
#include "tiles.h"
#include "pairs.h"
#include "tile_registers.h"
#include "simd_integers.h"
#include "quantized_rows.inl"

// Prefetch distance of weights for few rows, in bytes.
#define PENSTOCK_AHEAD 2048

#include "transpose.inl"
#include "quantized_formats.inl"
#include "quantized_rounding.inl"
#include "quantized_tiles.inl"

namespace PENSTOCK_NAMESPACE {

// Bytes of quantised rows that a thread multiplies with every panel: they should stay in the L2 cache.
constexpr int64_t kQuantizedRowsInCache = 256 * 1024;
// Up to this many rows every thread quantises its own copy, which takes less time than a barrier.
constexpr int64_t kFewRows = 2;

// Multiply-adds per turn of a thread between two looks for work, and the maximum of panels per turn.
constexpr int64_t kProductsPerTurn = 1024 * 1024;
constexpr int64_t kMostPanelsPerTurn = 4;

struct QuantizedJob {
  const QuantizedLinearArgs* args;
  QuantizedRows rows;  // up to kFewRows: `rows_at_once` for each thread
  int64_t rows_at_once;
  float* memory;  // of the shares
  Shares panels;  // of the current rows
};

// Scratch memory for `count` rows; values is nullptr when allocation fails.
static QuantizedRows place_rows(Scratch& scratch, const QuantizedShape& s, int64_t count) {
  const int64_t groups = num_row_groups(s.in_features);
  const int64_t parts = parts_per_group(s);
  float* memory = scratch.get(static_cast<size_t>(count * groups * (kGroupUnits + 1 + parts)));
  if (memory == nullptr) return {};
  float* const scales = memory + count * groups * kGroupUnits;
  return {reinterpret_cast<int32_t*>(memory), scales, scales + count * groups, groups, parts};
}

// Products by vectors: rows of a tile are interleaved.
struct ByVectors {
  static constexpr int kRows = kQuantizedTileRows;
  static constexpr bool kInterleaved = true;

  template <class Format>
  PENSTOCK_INLINE void multiply(const QuantizedLinearArgs& a, const QuantizedRows& x, int64_t rows, int64_t panel,
                                const float* bias, float* out, int64_t out_stride) {
    multiply_panel<Format>(a, x, rows, panel, bias, out, out_stride);
  }
};

// Quantises the rows of a tile of x; rows of x are x_stride apart.
template <class Products>
static void quantize_tile(const QuantizedShape& s, const float* x, int64_t x_stride, const QuantizedRows& rows,
                          const Tiles::Tile& tile) {
  const QuantizedRows to = rows_after(rows, tile.start, tile.height, 0);
  const int64_t unit_stride = Products::kInterleaved ? tile.height : 1;
  const int64_t row_stride = Products::kInterleaved ? 1 : kGroupUnits;
  for (int64_t i = 0; i < tile.height; ++i)
    quantize_row(x + (tile.start + i) * x_stride, s.in_features, tile.height, unit_stride, row_offset(s),
                 {to.values + i * row_stride, to.scales + i, to.offsets + i, to.groups, to.parts});
}

// A panel times a chunk of rows. The last panel of the weight may be wider than the output: it goes through a buffer.
template <class Products>
static void multiply_quantized_panel(const QuantizedLinearArgs& a, const QuantizedRows& x, int64_t first_row,
                                     int64_t rows, int64_t panel) {
  const QuantizedShape& s = a.shape;
  const auto multiply = [&](const QuantizedRows& some, int64_t count, const float* bias, float* out, int64_t out_stride) {
    with_format(s, [&](auto format) {
      Products::template multiply<decltype(format)>(a, some, count, panel, bias, out, out_stride);
    });
  };
  float* const out = a.out + first_row * a.out_stride + panel * kPanel;
  const float* const panel_bias = a.bias == nullptr ? nullptr : a.bias + panel * kPanel;
  const int64_t columns = s.out_features - panel * kPanel;
  if (columns >= kPanel) return multiply(x, rows, panel_bias, out, a.out_stride);
  float bias[kPanel] = {};
  if (a.bias != nullptr) std::memcpy(bias, panel_bias, columns * sizeof(float));
  float edge[Products::kRows * kPanel];
  for (int64_t start = 0, height; start < rows; start += height) {
    height = Tiles(rows, Products::kRows).around(start).height;
    multiply(rows_after(x, start, 0, 0), height, a.bias == nullptr ? nullptr : bias, edge, kPanel);
    for (int64_t i = 0; i < height; ++i)
      std::memcpy(out + (start + i) * a.out_stride, edge + i * kPanel, columns * sizeof(float));
  }
}

static void share_panels(QuantizedJob& job) {
  const int num_threads = job.args->num_threads;
  job.panels.divide(job.memory, num_threads, divided_up(num_panels(job.args->shape), num_threads));
}

template <class Products>
static void quantized_linear_thread(void* data, int thread, const Team& team) {
  auto& job = *static_cast<QuantizedJob*>(data);
  const QuantizedLinearArgs& a = *job.args;
  const int64_t last = num_panels(a.shape);
  const bool are_few = a.rows <= kFewRows;
  const QuantizedRows rows = are_few ? rows_after(job.rows, thread * job.rows_at_once, 0, 0) : job.rows;
  for (int64_t first = 0; first < a.rows; first += job.rows_at_once) {
    const int64_t count = a.rows - first < job.rows_at_once ? a.rows - first : job.rows_at_once;
    const Tiles tiles(count, Products::kRows);
    const auto quantize = [&](int64_t tile) {
      quantize_tile<Products>(a.shape, a.x + first * a.x_stride, a.x_stride, rows, tiles.at(tile));
    };
    if (are_few) {
      for (int64_t tile = 0; tile < tiles.count; ++tile) quantize(tile);
    } else {
      if (first != 0) team.barrier();  // other threads may still read the previous rows
      if (first != 0 && thread == 0) share_panels(job);
      // Whole tiles: rows of a tile are interleaved, and shared cache lines would cause false sharing.
      for (int64_t tile = thread; tile < tiles.count; tile += team.num_threads) quantize(tile);
      team.barrier();
    }
    const int64_t products = count * a.shape.in_features * kPanel;
    const int64_t per_turn = least(divided_up(kProductsPerTurn, products), kMostPanelsPerTurn);
    for (Shares::Pieces turn; job.panels.take(thread, per_turn, turn);)
      for (int64_t panel = turn.begin; panel < least(turn.end, last); ++panel)
        multiply_quantized_panel<Products>(a, rows, first, count, panel);
  }
}

template <class Products>
static bool quantized_linear_by(const QuantizedLinearArgs& a) {
  if (a.rows == 0) return true;
  const int64_t tile = Products::kRows;
  const int64_t fitting = kQuantizedRowsInCache / (num_row_groups(a.shape.in_features) * kGroup);
  const int64_t most = fitting < 4 * tile ? 4 * tile : fitting;
  // Chunks of nearly the same size, in whole tiles.
  const int64_t rows_at_once =
      least(a.rows, divided_up(divided_up(a.rows, divided_up(a.rows, most)), tile) * tile);
  static thread_local Scratch scratch, shares_scratch;
  const int64_t copies = a.rows <= kFewRows ? a.num_threads : 1;
  QuantizedJob job{&a, place_rows(scratch, a.shape, copies * rows_at_once), rows_at_once,
                   shares_scratch.get(Shares::floats_for(a.num_threads)),
                   {}};
  if (job.rows.values == nullptr || job.memory == nullptr) return false;
  share_panels(job);
  run_parallel(a.num_threads, quantized_linear_thread<Products>, &job);
  return true;
}

static bool quantized_linear(const QuantizedLinearArgs& a) { return quantized_linear_by<ByVectors>(a); }

static int64_t packed_bytes(const QuantizedShape& s) { return num_panels(s) * panel_bytes(s); }

struct QuantizedRowsJob {
  const QuantizedRowsArgs* args;
  float* rests;  // [threads][in_features]; nullptr without a rest
};

static void quantized_rows_thread(void* data, int thread, const Team& team) {
  const auto& job = *static_cast<const QuantizedRowsJob*>(data);
  const QuantizedRowsArgs& a = *job.args;
  const int64_t size = a.shape.in_features;
  const int64_t begin = a.num_ids * thread / team.num_threads, end = a.num_ids * (thread + 1) / team.num_threads;
  for (int64_t i = begin; i < end; ++i) {
    float* row = a.out + i * size;
    read_row(a.shape, a.weight, a.ids[i], row);
    if (a.rest == nullptr) continue;
    float* rest = job.rests + thread * size;
    read_row(a.shape, a.rest, a.ids[i], rest);
    for (int64_t k = 0; k < size; ++k) row[k] += rest[k];
  }
}

static bool quantized_rows(const QuantizedRowsArgs& a) {
  static thread_local Scratch scratch;
  QuantizedRowsJob job{&a, nullptr};
  if (a.rest != nullptr) {
    job.rests = scratch.get(static_cast<size_t>(a.num_threads * a.shape.in_features));
    if (job.rests == nullptr) return false;
  }
  run_parallel(a.num_ids < 4 ? 1 : a.num_threads, quantized_rows_thread, &job);
  return true;
}

static const QuantizedKernels kQuantizedTable = {
    PENSTOCK_NAME, packed_bytes, pack, unpack, quantized_linear, quantized_rows, round_weight,
};

}  // namespace PENSTOCK_NAMESPACE
