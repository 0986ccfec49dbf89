// Products with quantised weights by tile registers (AMX), for many rows.
//
// They read the panels that products by vectors read. A run of a panel is a tile of half the depth for every 16
// outputs, since each run has scales of its own; 4-bit weights are unpacked to bytes first, once for all rows. Sums of a
// run are exact integers, and are scaled and added in the order of products by vectors, so that the bits are equal.

namespace PENSTOCK_NAMESPACE {

// Runs whose sums of integers wait in the L1 cache: their products do not wait for the additions of floats.
constexpr int64_t kRunsAtOnce = 8;
constexpr int64_t kByteRunBytes = kGroup * kPanel;

// A run as bytes, [unit][output][4 bytes].
template <class Format>
PENSTOCK_INLINE const uint8_t* bytes_of_run(const uint8_t* run, uint8_t* buffer) {
  if constexpr (Format::kRunBytes == kByteRunBytes) {
    return run;
  } else {
    for (int k = 0; k < kGroupUnits / 2; ++k)
      for (int v = 0; v < kPanelVectors; ++v) {
        const ByteVec both = load_bytes<ByteVec>(run + (k * kPanelVectors + v) * sizeof(ByteVec));
        const ByteVec low = Format::bytes(low_halves(both)), high = Format::bytes(high_halves(both));
        std::memcpy(buffer + (2 * k * kPanelVectors + v) * sizeof(ByteVec), &low, sizeof low);
        std::memcpy(buffer + ((2 * k + 1) * kPanelVectors + v) * sizeof(ByteVec), &high, sizeof high);
      }
    return buffer;
  }
}

// Some runs of a panel.
struct Runs {
  const uint8_t* bytes[kRunsAtOnce];
  const uint8_t* heads[kRunsAtOnce];
  int64_t count;
  int scale_bytes;
};

// sums: [run][height][kPanel], of a tile of rows. x: its first group.
template <bool kUnsignedWeights>
static __attribute__((noinline)) void multiply_runs(TileRegisters& tiles, const QuantizedRows& x, int64_t height,
                                                    const Runs& runs, int32_t* sums) {
  constexpr int64_t kPanelBytes = kPanel * 4;
  constexpr int kColumns = kPanel / kTileWidth;
  const int32_t* values = x.values;
  for (int64_t g = 0; g < runs.count; ++g, values += height * kGroupUnits, sums += height * kPanel) {
    tiles.template load_tile<kRowsTile>(values, kGroup);
    for_each<kColumns>([&](auto n) {
      tiles.template load_tile<kWeightsTile + n>(runs.bytes[g] + n * kTileRowBytes, kPanelBytes);
      tiles.template zero<n>();
      tiles.template add_byte_products<n, kRowsTile, kWeightsTile + n, kUnsignedWeights>();
      tiles.template store_tile<n>(sums + n * kTileWidth, kPanelBytes);
    });
  }
}

// Adds the sums of a panel's vector, of a tile of R rows, to the output. scales, offsets: of the tile.
template <class Format, int R>
static __attribute__((noinline)) void add_runs(const Runs& runs, int v, const float* scales, const float* offsets,
                                               const int32_t* sums, const float* bias, float* out, int64_t out_stride,
                                               bool is_first) {
  Vec total[R];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) total[i] = is_first ? Vec{} : load(out + i * out_stride);
  for (int64_t g = 0; g < runs.count; ++g, scales += R, offsets += R, sums += R * kPanel) {
    Vec weight_scale, minimum{};
    load_head<Format>(runs.heads[g], v, runs.scale_bytes, weight_scale, minimum);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const IntVec sum = load_bytes<IntVec>(sums + i * kPanel) + (IntVec)splat(kMagic);
      add_sum<Format>(sum, weight_scale, minimum, scales[i], offsets[i], total[i]);
    }
  }
  const Vec more = bias == nullptr ? Vec{} : load(bias);
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) store(out + i * out_stride, total[i] + more);
}

struct ByTiles {
  static constexpr int kRows = kTileHeight;
  static constexpr bool kInterleaved = false;

  // A panel times all rows of a chunk, as `multiply_panel`.
  template <class Format>
  static void multiply(const QuantizedLinearArgs& a, const QuantizedRows& x, int64_t rows, int64_t number,
                       const float* bias, float* out, int64_t out_stride) {
    const QuantizedShape& s = a.shape;
    const int64_t per_scale = runs_per_head(s);
    const uint8_t* const panel = static_cast<const uint8_t*>(a.weight) + number * panel_bytes(s);
    const Tiles tiles(rows, kRows);
    const int64_t above = tiles.rows_of_taller();
    alignas(64) uint8_t unpacked[kRunsAtOnce * kByteRunBytes];
    TileRegisters registers(static_cast<int>(tiles.height), kGroupUnits);
    for (int64_t first = 0; first < x.groups; first += kRunsAtOnce) {
      Runs runs{{}, {}, least(kRunsAtOnce, x.groups - first), s.scale_bytes};
      for (int64_t g = 0; g < runs.count; ++g) {
        runs.heads[g] = panel + (first + g) / per_scale * group_bytes(s);
        const uint8_t* const run = runs.heads[g] + head_bytes(s) + (first + g) % per_scale * Format::kRunBytes;
        runs.bytes[g] = bytes_of_run<Format>(run, unpacked + g * kByteRunBytes);
      }
      // The part of the weights that comes next is prefetched meanwhile.
      const uint8_t* const end = runs.heads[runs.count - 1] + group_bytes(s);
      Fetch fetch = fetch_in_turns(end, runs.count * Format::kRunBytes, tiles.count, true);
      const float* const last_bias = first + runs.count == x.groups ? bias : nullptr;
      const auto multiply_tiles = [&](int64_t start, int64_t height, int64_t count) {
        registers.set_rows(static_cast<int>(height));
        const QuantizedRows some = rows_after(x, start, height, first);
        for (int64_t tile = 0; tile < count; ++tile, fetch.turn())
          multiply_tile<Format>(registers, rows_after(some, tile * height, height, 0), height, runs, last_bias,
                                out + (start + tile * height) * out_stride, out_stride, first == 0);
      };
      if (tiles.num_taller > 0) multiply_tiles(0, tiles.height + 1, tiles.num_taller);
      multiply_tiles(above, tiles.height, tiles.count - tiles.num_taller);
    }
  }

 private:
  // A tile of rows times some runs.
  template <class Format>
  static void multiply_tile(TileRegisters& registers, const QuantizedRows& x, int64_t height, const Runs& runs,
                            const float* bias, float* out, int64_t out_stride, bool is_first) {
    alignas(64) int32_t sums[kRunsAtOnce * kRows * kPanel];
    multiply_runs<Format::kIsUnsigned>(registers, x, height, runs, sums);
    with_constant<kRows>(height, [&](auto r) {
      for (int v = 0; v < kPanelVectors; ++v)
        add_runs<Format, r>(runs, v, x.scales, x.offsets, sums + v * kLanes,
                            bias == nullptr ? nullptr : bias + v * kLanes, out + v * kLanes, out_stride, is_first);
    });
  }
};

// Groups of half a run have two sums to a run, and are multiplied by vectors.
[[maybe_unused]] static bool quantized_linear_by_tiles(const QuantizedLinearArgs& a) {
  return parts_per_group(a.shape) == 1 ? quantized_linear_by<ByTiles>(a) : quantized_linear_by<ByVectors>(a);
}

}  // namespace PENSTOCK_NAMESPACE
