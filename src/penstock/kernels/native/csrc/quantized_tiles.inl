// Products of quantised rows and panels of a quantised weight.
//
// The integer sum of a group of inner elements is exact; the groups are then added in their order as floats.

namespace PENSTOCK_NAMESPACE {

constexpr int kQuantizedTileRows = PENSTOCK_QUANTIZED_TILE_ROWS;
// Bytes of a panel's part that stays in the L1 cache while all rows pass over it.
constexpr int64_t kPartBytes = 16 * 1024;

// Heads of scale groups: bytes of one, and of one of its parts.
struct Heads {
  int64_t bytes, part_bytes, parts;
  int scale_bytes;
};

// Tiles of R rows by a panel, one after the other, over some groups.
//
// rows: of the first tile and group. weight: of the scale group that the first group is in.
struct Column {
  QuantizedRows rows;
  const uint8_t* weight;
  Heads heads;
  int64_t groups;
  // Of `groups_per_scale` groups of a scale, the first is `first_inside`.
  int64_t first_inside, groups_per_scale;
  const float* bias;
  float* out;
  int64_t out_stride;
  bool is_first, is_last;
  // Memory to prefetch meanwhile: next_step bytes per cache line of weights.
  const char* next;
  int64_t next_step;
  int64_t num_tiles;
};

PENSTOCK_INLINE QuantizedRows rows_after(const QuantizedRows& x, int64_t tile_start, int64_t height, int64_t group) {
  const int64_t scales = tile_start * x.groups + group * height;
  return {x.values + scales * kGroupUnits, x.scales + scales, x.offsets + scales * x.parts, x.groups, x.parts};
}

// Adds a finished sum, which is an exact integer and kMagic, times its scales. offset: of the row.
template <class Format>
PENSTOCK_INLINE void add_sum(IntVec sum, Vec weight_scale, Vec minimum, float scale, float offset, Vec& total) {
  // All of these are integers below 2^24, so exact.
  const Vec exact = (Vec)sum - (Format::kHasMinimums ? splat(kMagic) : splat(offset));
  const Vec both = weight_scale * splat(scale);
#if defined(PENSTOCK_FMA_REGISTER)
  multiply_add(total, exact, both);
  if (Format::kHasMinimums) multiply_add(total, minimum, splat(offset));
#else
  Vec product = exact * both;
  PENSTOCK_NEEDED_NOW(product);
  total += product;
  if (!Format::kHasMinimums) return;
  product = minimum * splat(offset);
  PENSTOCK_NEEDED_NOW(product);
  total += product;
#endif
}

// Scales and minimums of a panel's vector.
template <class Format>
PENSTOCK_INLINE void load_head(const uint8_t* head, int v, int scale_bytes, Vec& scale, Vec& minimum) {
  const int64_t vector_bytes = kLanes * scale_bytes;
  scale = load_scales(head + v * vector_bytes, scale_bytes);
  if (Format::kHasMinimums) minimum = load_scales(head + (kPanelVectors + v) * vector_bytes, scale_bytes);
}

// Adds finished sums. head: scales, then minimums.
template <class Format, int R>
PENSTOCK_INLINE void add_sums(const uint8_t* head, int scale_bytes, const float* scales, const float* offsets,
                              const IntVec (&sum)[R][kPanelVectors], Vec (&total)[R][kPanelVectors]) {
  for (int v = 0; v < kPanelVectors; ++v) {
    Vec weight_scale, minimum{};
    load_head<Format>(head, v, scale_bytes, weight_scale, minimum);
    for (int i = 0; i < R; ++i) add_sum<Format>(sum[i][v], weight_scale, minimum, scales[i], offsets[i], total[i][v]);
  }
}

template <int R>
PENSTOCK_INLINE void start_sums(IntVec (&sum)[R][kPanelVectors]) {
  for (int i = 0; i < R; ++i)
    for (int v = 0; v < kPanelVectors; ++v) sum[i][v] = (IntVec)splat(kMagic);
}

// total += x * weight, of one run.
template <class Format, int R>
PENSTOCK_INLINE void multiply_run(const QuantizedRows& x, const uint8_t* run, const uint8_t* head, const Heads& heads,
                                  Vec (&total)[R][kPanelVectors]) {
  IntVec sum[R][kPanelVectors];
  start_sums(sum);
  if constexpr (Format::kHasParts) {
    if (heads.parts == 2) {
      constexpr int kHalf = kGroupUnits / 2;
      Format::template multiply<R, 0, kHalf>(x.values, run, sum);
      add_sums<Format, R>(head, heads.scale_bytes, x.scales, x.offsets, sum, total);
      start_sums(sum);
      Format::template multiply<R, kHalf, kHalf>(x.values, run, sum);
      add_sums<Format, R>(head + heads.part_bytes, heads.scale_bytes, x.scales, x.offsets + R, sum, total);
      return;
    }
  }
  Format::template multiply<R, 0, kGroupUnits>(x.values, run, sum);
  add_sums<Format, R>(head, heads.scale_bytes, x.scales, x.offsets, sum, total);
}

template <class Format, int R>
static __attribute__((noinline)) void run_tiles(const Column& t) {
  constexpr int64_t kLines = Format::kRunBytes / kCacheLine;
  const Heads heads = t.heads;
  const char* next = t.next;
  for (int64_t tile = 0; tile < t.num_tiles; ++tile) {
    float* const out = t.out + tile * R * t.out_stride;
    Vec total[R][kPanelVectors];
    for (int i = 0; i < R; ++i)
      for (int v = 0; v < kPanelVectors; ++v)
        total[i][v] = t.is_first ? Vec{} : load(out + i * t.out_stride + v * kLanes);
    QuantizedRows x = rows_after(t.rows, tile * R, R, 0);
    const uint8_t* head = t.weight;
    int64_t inside = t.first_inside;
    for (int64_t g = 0; g < t.groups; inside = 0) {
      const uint8_t* run = head + heads.bytes + inside * Format::kRunBytes;
      for (; inside < t.groups_per_scale && g < t.groups; ++inside, ++g, run += Format::kRunBytes) {
        for (int line = 0; line < kLines; ++line) __builtin_prefetch(next + line * t.next_step);
        multiply_run<Format, R>(x, run, head, heads, total);
        next += kLines * t.next_step;
        x = rows_after(x, 0, R, 1);
      }
      head = run;
    }
    for (int v = 0; v < kPanelVectors; ++v) {
      const Vec bias = t.bias == nullptr || !t.is_last ? Vec{} : load(t.bias + v * kLanes);
      for (int i = 0; i < R; ++i) store(out + i * t.out_stride + v * kLanes, total[i][v] + bias);
    }
  }
}

template <class Format>
static void run_column(int64_t rows, const Column& t) {
  with_constant<kQuantizedTileRows>(rows, [&](auto r) { run_tiles<Format, r>(t); });
}

// A panel times all rows of a chunk, into `out`, whose rows are out_stride apart; bias, out: of the panel.
template <class Format>
static void multiply_panel(const QuantizedLinearArgs& a, const QuantizedRows& x, int64_t rows, int64_t number,
                           const float* bias, float* out, int64_t out_stride) {
  const QuantizedShape& s = a.shape;
  const int64_t per_scale = runs_per_head(s), all = x.groups;
  const Heads heads{head_bytes(s), part_bytes(s), x.parts, s.scale_bytes};
  const uint8_t* const panel = static_cast<const uint8_t*>(a.weight) + number * panel_bytes(s);
  const Tiles tiles(rows, kQuantizedTileRows);
  const bool is_single = tiles.count == 1;
  const int64_t block = is_single ? all : kPartBytes / Format::kRunBytes;
  for (int64_t g = 0; g < all; g += block) {
    const int64_t part = least(block, all - g), scale = g / per_scale;
    const uint8_t* const weight = panel + scale * group_bytes(s);
    // Several tiles share the prefetch of the next part; a single tile prefetches its own weights PENSTOCK_AHEAD ahead.
    const char* const next = reinterpret_cast<const char*>(weight) +
                             (is_single ? PENSTOCK_AHEAD : (g % per_scale + part) * Format::kRunBytes);
    const int64_t next_step = divided_up(kCacheLine, tiles.count);
    Column t{rows_after(x, 0, tiles.height + 1, g), weight, heads, part, g % per_scale,
             per_scale, bias, out, out_stride, g == 0, g + part == all, next,
             next_step, tiles.num_taller};
    if (t.num_tiles > 0) run_column<Format>(tiles.height + 1, t);
    const int64_t above = tiles.rows_of_taller();
    t.rows = rows_after(x, above, tiles.height, g);
    t.out += above * out_stride;
    t.next += tiles.num_taller * next_step * (part * Format::kRunBytes / kCacheLine);
    t.num_tiles = tiles.count - tiles.num_taller;
    run_column<Format>(tiles.height, t);
  }
}

}  // namespace PENSTOCK_NAMESPACE
