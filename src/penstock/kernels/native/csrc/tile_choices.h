// Sizes that decide how fast products by tiles are, and change no bits. They were chosen from documented throughputs;
// `benchmarks.kernels --tiles` measures others.
#pragma once

#include <cstdint>

namespace penstock {

struct TileChoices {
  // Tiles of inner elements whose weights (2 KB each) stay in the L1 cache while all rows pass over them.
  int64_t depth = 16;
  // Bytes of rounded rows that a thread multiplies with every panel: three quarters of the L2 caches of processors with
  // AMX, so that weights are read once for many rows.
  int64_t row_bytes = 1536 * 1024;
  // Prefetch distance in bytes of weights that are read once: four tiles of inner elements.
  int64_t bytes_ahead = 8 * 1024;
  // Panels, one or two, that one tile of rows takes at once: two give four chains of sums, which hide the latency of a
  // product, and two streams of memory.
  int64_t panels_at_once = 2;
  // Multiply-adds per turn of a thread.
  int64_t products_per_turn = 512 * 1024;
  // Rows from which on quantised weights are multiplied by tiles. Fewer are bound by memory, and products by vectors
  // need no sums of integers in memory.
  int64_t fewest_quantized_rows = 16;
};

// Of the process; changed by benchmarks alone, between products.
inline TileChoices tile_choices;

// How weights of a few rows are read, without tiles; this changes no bits either. The process's are those of its
// processor (processor.cpp).
struct StreamChoices {
  // Panels that one row takes at once, at most 4.
  int64_t of_one_row = 4;
  // Prefetch distance in bytes in each of several panels that are taken at once; 0 for none.
  int64_t bytes_ahead = 0;
};

inline StreamChoices stream_choices;

}  // namespace penstock
