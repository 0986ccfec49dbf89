// Products in bfloat16 arithmetic by tiles (AMX).
//
// Weights are packed in panels of two tiles' outputs, tile after tile, in the order in which they are multiplied. Rows
// are rounded and laid out in the same order, in tiles of one height. Every output is one chain of tiles over the inner
// dimension, which is padded with zeros to whole tiles: so a row has the same bits alone and in any batch.

namespace PENSTOCK_NAMESPACE {

// Two adjacent elements of a row, packed for tiles.
struct TilePair {
  uint16_t first, second;
};

constexpr int64_t kTilePanel = 2 * kTileWidth;  // outputs of a panel
constexpr int kTileUnits = 16;                  // pairs of a row of a tile
constexpr int64_t kTilePairs = kTileUnits * kTileWidth;
constexpr int64_t kPanelPairs = kTileUnits * kTilePanel;  // of a panel, per tile of inner elements
// Rows of a block: two tiles by the two of a panel take four loads for four products.
constexpr int64_t kBlockRows = 2 * kTileHeight;

// Rows of a product in tiles of one height; the last tile may have some zero rows.
struct RowTiles {
  int64_t count, height;

  explicit RowTiles(int64_t rows) : count(divided_up(rows, kTileHeight)), height(divided_up(rows, count)) {}
};

PENSTOCK_INLINE int64_t padded_pairs(int64_t pairs) { return divided_up(pairs, kTileUnits) * kTileUnits; }

// Place of a pair of features of an output in the packed weight.
PENSTOCK_INLINE int64_t place_in_tiles(int64_t n, int64_t k, int64_t pairs) {
  const int64_t inside = n % kTilePanel;
  return n / kTilePanel * kTilePanel * padded_pairs(pairs) + k / kTileUnits * kPanelPairs +
         inside / kTileWidth * kTilePairs + k % kTileUnits * kTileWidth + inside % kTileWidth;
}

// Rounds a tile of rows to bfloat16, [tile of inner elements][row][pair]. x: `count` rows of 2 * pairs elements; the
// other ones of `height` are zero.
static void round_to_tile(const float* x, int64_t x_stride, int64_t count, int64_t height, int64_t pairs,
                          TilePair* to) {
  const int64_t depth = divided_up(pairs, kTileUnits), whole = pairs / kTileUnits;
  for (int64_t row = 0; row < height; ++row) {
    TilePair* line = to + row * kTileUnits;
    for (int64_t k = 0; k < depth; ++k, line += height * kTileUnits) {
      Bfloat16Pair rounded[kTileUnits] = {};
      const int64_t units = row >= count ? 0 : k < whole ? kTileUnits : pairs - whole * kTileUnits;
      round_row(x + row * x_stride + k * 2 * kTileUnits, units, rounded);
      std::memcpy(line, rounded, sizeof rounded);
    }
  }
}

// Rounded rows in memory: pairs from a tile of rows to the next, from row to row, and from a row's tile of inner
// elements to its next one.
struct TileRows {
  const TilePair* at;
  int64_t tile_stride, row_stride, step;

  // As `round_to_tile` lays them out.
  static TileRows rounded(const float* x, int64_t height, int64_t pairs) {
    return {reinterpret_cast<const TilePair*>(x), padded_pairs(pairs) * height, kTileUnits, height * kTileUnits};
  }
  // Row after row, each padded to whole tiles of inner elements.
  static TileRows in_order(const float* x, int64_t row_stride, int64_t height) {
    return {reinterpret_cast<const TilePair*>(x), height * row_stride, row_stride, kTileUnits};
  }

  TileRows from(int64_t tile, int64_t depth) const {
    return {at + tile * tile_stride + depth * step, tile_stride, row_stride, step};
  }
};

// A block of up to two tiles of rows by one or two panels: out += x * weight over `depth` tiles of inner elements.
//
// weight: panels, panel_stride pairs apart. out: rows out_stride floats apart, panels out_panel_stride; starts from
// zero if is_first.
struct TileBlock {
  TileRows x;
  int64_t height;
  const TilePair* weight;
  int64_t panel_stride, depth;
  float* out = nullptr;
  int64_t out_stride = 0, out_panel_stride = 0;
  bool is_first = true;
};

// R tiles of rows by N tiles of outputs, at most four in all: each tile of weights is loaded once, and followed by its
// products with all tiles of rows.
template <int R, int N>
static __attribute__((noinline)) void multiply_block(TileRegisters& tiles, const TileBlock& b, Fetch& given) {
  static_assert(R <= 2 && R * N <= 4, "there are four tiles of sums");
  const int64_t out_row_bytes = b.out_stride * static_cast<int64_t>(sizeof(float));
  float* out[R * N];
  for_each<R * N>([&](auto i) {
    out[i] = b.out + i / N * b.height * b.out_stride + i % N / 2 * b.out_panel_stride + i % 2 * kTileWidth;
    if (b.is_first) tiles.template zero<i>();
    else tiles.template load_tile<i>(out[i], out_row_bytes);
  });
  const TilePair *x = b.x.at, *weight = b.weight;
  const int64_t tile_stride = b.x.tile_stride, x_step = b.x.step, panel_stride = b.panel_stride;
  const int64_t x_row_bytes = b.x.row_stride * static_cast<int64_t>(sizeof(TilePair));
  Fetch fetch = given;
  for (int64_t k = 0; k < b.depth; ++k, x += x_step, weight += kPanelPairs) {
    fetch.turn();
    for_each<R>([&](auto r) { tiles.template load_tile<kRowsTile + r>(x + r * tile_stride, x_row_bytes); });
    for_each<N>([&](auto n) {
      tiles.template load_tile<kWeightsTile + n % 2>(weight + n / 2 * panel_stride + n % 2 * kTilePairs, kTileRowBytes);
      for_each<R>([&](auto r) {
        tiles.template add_bfloat16_products<r * N + n, kRowsTile + r, kWeightsTile + n % 2>();
      });
    });
  }
  given = fetch;
  for_each<R * N>([&](auto i) { tiles.template store_tile<i>(out[i], out_row_bytes); });
}

static void multiply_block(int64_t row_tiles, int64_t panels, TileRegisters& tiles, const TileBlock& b, Fetch& fetch) {
  if (row_tiles == 2) multiply_block<2, 2>(tiles, b, fetch);
  else if (panels == 2) multiply_block<1, 4>(tiles, b, fetch);
  else multiply_block<1, 2>(tiles, b, fetch);
}

// A block of a panel of which `rows` rows and `columns` columns go to the output. b: without an output of its own.
static void multiply_through_buffer(TileRegisters& tiles, int64_t row_tiles, TileBlock b, float* out,
                                    int64_t out_stride, int64_t rows, int64_t columns) {
  float buffer[kBlockRows * kTilePanel];
  Fetch fetch = fetch_nothing();
  b.out = buffer;
  b.out_stride = kTilePanel;
  multiply_block(row_tiles, 1, tiles, b, fetch);
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(out + row * out_stride, buffer + row * kTilePanel, columns * sizeof(float));
}

// Panels that one tile of rows takes at once, and more of them.
PENSTOCK_INLINE int tile_panels_at_once(int64_t rows) {
  return rows <= kTileHeight && tile_choices.panels_at_once > 1 ? 2 : 1;
}

// Some panels times a chunk of rows, as in `multiply_panels`. x: the rows, in tiles of `RowTiles(rows).height`; what
// memory holds after the last one is read where the last tile is lower.
static void multiply_tile_panels(const LinearArgs& a, const TileRows& x, int64_t rows, const Panels& panels, float* out,
                                 int64_t out_panel_stride) {
  if (panels.count == 0) return;
  const RowTiles row_tiles(rows);
  const int64_t depth = divided_up(a.in_features, kTileUnits), height = row_tiles.height;
  const int64_t panel_pairs = depth * kPanelPairs, panel_stride = panel_pairs * panels.apart;
  const bool is_single = row_tiles.count == 1, is_padded = row_tiles.count * height > rows;
  // A last block that has other rows than these goes through a buffer.
  const int64_t in_place = is_padded ? (row_tiles.count - 1) / 2 * 2 : row_tiles.count;
  const auto* const weights = static_cast<const TilePair*>(a.weight) + panels.first * panel_pairs;
  TileRegisters tiles(static_cast<int>(height), kTileUnits);
  for (int64_t done = 0, at_once; done < panels.count; done += at_once) {
    at_once = least(tile_panels_at_once(rows), panels.count - done);
    const TilePair* const panel = weights + done * panel_stride;
    float* const panel_out = out + done * out_panel_stride;
    // One tile of rows reads weights once, so that they are prefetched all along. Several tiles share a part of them in
    // the L1 cache, and prefetch the next one meanwhile.
    const int64_t part = is_single ? depth : tile_choices.depth;
    for (int64_t k = 0; k < depth; k += part) {
      const int64_t here = least(part, depth - k), bytes = here * kPanelPairs * int64_t{sizeof(TilePair)};
      const TilePair* const weight = panel + k * kPanelPairs;
      const char* const next = reinterpret_cast<const char*>(weight) + (is_single ? tile_choices.bytes_ahead : bytes);
      const int64_t turns = divided_up(row_tiles.count, 2) * here;
      Fetch fetch = at_once > 1 ? fetch_nothing() : fetch_in_turns(next, bytes, turns, false);
      for (int64_t tile = 0; tile < in_place; tile += 2)
        multiply_block(least(2, in_place - tile), at_once, tiles,
                       {x.from(tile, k), height, weight, panel_stride, here, panel_out + tile * height * a.out_stride,
                        a.out_stride, out_panel_stride, k == 0},
                       fetch);
    }
    if (is_padded)
      multiply_through_buffer(tiles, row_tiles.count - in_place, {x.from(in_place, 0), height, panel, 0, depth},
                              panel_out + in_place * height * a.out_stride, a.out_stride, rows - in_place * height,
                              kTilePanel);
  }
}

// The partial panel times a chunk of rows, as in `multiply_edge`.
static void multiply_tile_edge(const LinearArgs& a, const TileRows& x, int64_t first_row, int64_t rows) {
  const int64_t panel = a.out_features / kTilePanel, columns = a.out_features % kTilePanel;
  const RowTiles row_tiles(rows);
  const int64_t depth = divided_up(a.in_features, kTileUnits), height = row_tiles.height;
  const auto* const weight = static_cast<const TilePair*>(a.weight) + panel * depth * kPanelPairs;
  TileRegisters tiles(static_cast<int>(height), kTileUnits);
  for (int64_t tile = 0; tile < row_tiles.count; tile += 2) {
    const int64_t first = tile * height, count = least(2, row_tiles.count - tile);
    multiply_through_buffer(tiles, count, {x.from(tile, 0), height, weight, 0, depth},
                            a.out + (first_row + first) * a.out_stride + panel * kTilePanel, a.out_stride,
                            least(count * height, rows - first), columns);
  }
}

}  // namespace PENSTOCK_NAMESPACE
