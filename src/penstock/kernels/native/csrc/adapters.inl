// LoRA adapters of a linear layer: out += scaling * B (A x), with the adapter of each row.
//
// Rows are grouped by adapter, so that each adapter is read once per step. Every output is one chain of FMAs over the
// inner dimension, whatever the other rows: a row's result is bit-exact alone and in any batch.

namespace PENSTOCK_NAMESPACE {

constexpr int kAdapterVectors = kAdapterPanel / kLanes;
// Rows and panels multiplied at once, as far as there are registers for their sums; and panels of outputs that a thread
// takes at once.
constexpr int kAdapterRows = 4;
constexpr int kAdapterAtOnce = kLanes >= 16 ? 4 : 1;
constexpr int64_t kAdapterPanels = 8;

PENSTOCK_INLINE Vec load_adapter(const float* from) { return load(from); }
PENSTOCK_INLINE Vec load_adapter(const Float16* from) { return load(from); }
PENSTOCK_INLINE Vec load_adapter(const Bfloat16* from) {
  HalfVec halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Vec)(__builtin_convertvector(halves, UintVec) << 16);
}

// Memory to prefetch while other memory is read: several ranges, one after the other.
struct AdapterFetch {
  struct Range {
    const char* next;
    const char* end;
  };
  Range* ranges;
  int64_t count;
  int64_t lines;  // per turn

  void turn() {
    for (int64_t line = 0; line < lines && count > 0; ++line) {
      __builtin_prefetch(ranges->next, 0, 2);
      ranges->next += kCacheLine;
      if (ranges->next >= ranges->end) ++ranges, --count;
    }
  }
};

// Products of R rows with P panels, over `depth` inner elements.
//
// out: by row. places: by panel, offset of its products in a row. factors: by panel, with which products are multiplied
// before they overwrite the row; nullptr adds them to it. last_width: number of products of the last panel.
template <class W>
struct AdapterTile {
  const float* rows[kAdapterRows];
  const W* panels[kAdapterAtOnce];
  float* out[kAdapterRows];
  int64_t places[kAdapterAtOnce];
  const float* factors;
  int64_t depth, last_width;
};

template <int R, int P, class W>
static __attribute__((noinline)) void multiply_adapter_tile(const AdapterTile<W>& t, AdapterFetch& given) {
  const float* x[R];
  const W* panels[P];
  AdapterFetch fetch = given;
#pragma GCC unroll 16
  for (int row = 0; row < R; ++row) {
    x[row] = t.rows[row];
    keep_apart(x[row]);
  }
#pragma GCC unroll 16
  for (int panel = 0; panel < P; ++panel) panels[panel] = t.panels[panel];
  Vec sums[P][R][kAdapterVectors] = {};
  for (int64_t k = 0; k < t.depth; ++k) {
    Vec xs[R];
#pragma GCC unroll 16
    for (int row = 0; row < R; ++row) xs[row] = splat(x[row][k]);
#pragma GCC unroll 16
    for (int panel = 0; panel < P; ++panel)
#pragma GCC unroll 16
      for (int v = 0; v < kAdapterVectors; ++v) {
        const Vec w = load_adapter(panels[panel] + k * kAdapterPanel + v * kLanes);
#pragma GCC unroll 16
        for (int row = 0; row < R; ++row) multiply_add(sums[panel][row][v], xs[row], w);
      }
    if (fetch.count > 0) fetch.turn();
  }
  given = fetch;
#pragma GCC unroll 16
  for (int panel = 0; panel < P; ++panel) {
    const bool is_partial = panel == P - 1 && t.last_width < kAdapterPanel;
#pragma GCC unroll 16
    for (int row = 0; row < R; ++row) {
      float* const out = t.out[row] + t.places[panel];
      if (is_partial) {
        float lanes[kAdapterPanel];
        for (int v = 0; v < kAdapterVectors; ++v) store(lanes + v * kLanes, sums[panel][row][v]);
        for (int64_t i = 0; i < t.last_width; ++i) out[i] += lanes[i];
        continue;
      }
#pragma GCC unroll 16
      for (int v = 0; v < kAdapterVectors; ++v)
        store(out + v * kLanes, t.factors == nullptr ? load(out + v * kLanes) + sums[panel][row][v]
                                                     : sums[panel][row][v] * splat(t.factors[panel]));
    }
  }
}

template <class W>
static void multiply_adapter_rows(const AdapterTile<W>& tile, int64_t num_rows, int64_t num_panels,
                                  AdapterFetch& fetch) {
  with_constant<kAdapterRows>(num_rows, [&](auto height) {
    with_constant<kAdapterAtOnce>(num_panels,
                                  [&](auto width) { multiply_adapter_tile<height, width, W>(tile, fetch); });
  });
}

// Rows of one adapter: `count` of the sorted rows, from `first` on.
struct AdapterGroup {
  int32_t slot, first, count, first_tile;
};

// Rows sorted by adapter. order: the rows; groups: of those with an adapter. shrunk: A x of the sorted rows, times the
// scaling, for each piece.
struct AdapterJob {
  const AdapterArgs* args;
  int32_t* order;
  AdapterGroup* groups;
  int64_t num_groups, num_tiles;
  float* shrunk;

  int64_t shrunk_stride() const { return args->num_pieces * args->max_rank; }

  // False when allocation fails.
  bool sort(const AdapterArgs& a, Scratch& scratch) {
    args = &a;
    const size_t sizes = a.rows + 2 * (a.num_slots + 1) + 4 * (a.num_slots + 1);
    const size_t kept = (sizes + 15) / 16 * 16;
    float* memory = scratch.get(kept + a.rows * shrunk_stride());
    if (memory == nullptr) return false;
    order = reinterpret_cast<int32_t*>(memory);
    int32_t* const counts = order + a.rows;
    int32_t* const next = counts + a.num_slots + 1;
    groups = reinterpret_cast<AdapterGroup*>(next + a.num_slots + 1);
    shrunk = memory + kept;
    std::memset(counts, 0, (a.num_slots + 1) * sizeof(int32_t));
    const auto slot_of = [&](int64_t row) {
      return a.slots[row] >= 0 && a.slots[row] < a.num_slots ? a.slots[row] : static_cast<int32_t>(a.num_slots);
    };
    for (int64_t row = 0; row < a.rows; ++row) ++counts[slot_of(row)];
    int32_t first = 0, tiles = 0;
    num_groups = 0;
    for (int32_t slot = 0; slot <= a.num_slots; ++slot) {
      next[slot] = first;
      if (slot < a.num_slots && counts[slot] > 0 && has_piece(slot)) {
        groups[num_groups++] = {slot, first, counts[slot], tiles};
        tiles += static_cast<int32_t>(divided_up(counts[slot], kAdapterRows));
      }
      first += counts[slot];
    }
    num_tiles = tiles;
    for (int64_t row = 0; row < a.rows; ++row) order[next[slot_of(row)]++] = static_cast<int32_t>(row);
    return true;
  }

  int64_t rank(int64_t slot, int64_t piece) const { return args->ranks[slot * args->num_pieces + piece]; }
  float scaling(int64_t slot, int64_t piece) const { return args->scalings[slot * args->num_pieces + piece]; }

  bool has_piece(int64_t slot) const {
    for (int64_t piece = 0; piece < args->num_pieces; ++piece)
      if (rank(slot, piece) > 0) return true;
    return false;
  }

  template <class W>
  const W* b_of(int64_t slot, int64_t piece) const {
    return static_cast<const W*>(args->b) + slot * args->b_size + args->pieces[3 * piece + 2];
  }

  // A x of one tile of rows of a group, for all pieces. Meanwhile the group's B is prefetched.
  template <class W>
  void shrink(const AdapterGroup& group, int64_t tile) const {
    const AdapterArgs& a = *args;
    const int64_t first = group.first + tile * kAdapterRows;
    const int64_t count = least(kAdapterRows, group.first + group.count - first);
    const float* rows[kAdapterRows];
    for (int64_t i = 0; i < count; ++i) rows[i] = a.x + order[first + i] * a.x_stride;
    float* const out = shrunk + first * shrunk_stride();
    if (a.a == nullptr) {
      for (int64_t piece = 0; piece < a.num_pieces; ++piece)
        for (int64_t i = 0; i < count; ++i)
          for (int64_t k = 0; k < rank(group.slot, piece); ++k)
            out[i * shrunk_stride() + piece * a.max_rank + k] = rows[i][k] * scaling(group.slot, piece);
      return;
    }
    constexpr int64_t kMostRanges = 8;
    AdapterFetch::Range ranges[kMostRanges];
    AdapterFetch fetch{ranges, 0, 0};
    int64_t num_bytes = 0, num_panels = 0;
    for (int64_t piece = 0; piece < a.num_pieces; ++piece) {
      const int64_t rank = this->rank(group.slot, piece);
      num_panels += divided_up(rank, kAdapterPanel);
      if (tile > 0 || rank == 0 || fetch.count == kMostRanges) continue;
      const int64_t of_piece = divided_up(a.pieces[3 * piece + 1], kAdapterPanel) * kAdapterPanel * rank * sizeof(W);
      const char* const begin = reinterpret_cast<const char*>(b_of<W>(group.slot, piece));
      ranges[fetch.count++] = {begin, begin + of_piece};
      num_bytes += of_piece;
    }
    const int64_t num_turns = divided_up(num_panels, kAdapterAtOnce) * a.in_features;
    fetch.lines = num_turns == 0 ? 0 : divided_up(num_bytes, num_turns * kCacheLine);
    float factors[kAdapterAtOnce];
    AdapterTile<W> tiles{};
    tiles.factors = factors;
    tiles.depth = a.in_features;
    tiles.last_width = kAdapterPanel;
    for (int64_t i = 0; i < count; ++i) {
      tiles.rows[i] = rows[i];
      tiles.out[i] = out + i * shrunk_stride();
    }
    int64_t num_taken = 0;
    for (int64_t piece = 0; piece < a.num_pieces; ++piece) {
      const W* const of_piece =
          static_cast<const W*>(a.a) + (group.slot * a.num_pieces + piece) * a.max_rank * a.in_features;
      for (int64_t k = 0; k < rank(group.slot, piece); k += kAdapterPanel) {
        tiles.panels[num_taken] = of_piece + k * a.in_features;
        tiles.places[num_taken] = piece * a.max_rank + k;
        factors[num_taken] = scaling(group.slot, piece);
        if (++num_taken < kAdapterAtOnce) continue;
        multiply_adapter_rows(tiles, count, num_taken, fetch);
        num_taken = 0;
      }
    }
    if (num_taken > 0) multiply_adapter_rows(tiles, count, num_taken, fetch);
  }

  // Adds B (A x) of a group's rows for some panels of a piece's outputs.
  template <class W>
  void expand(const AdapterGroup& group, int64_t piece, int64_t first_panel) const {
    const AdapterArgs& a = *args;
    const int64_t rank = this->rank(group.slot, piece);
    if (rank == 0) return;
    const int64_t first_output = a.pieces[3 * piece], num_outputs = a.pieces[3 * piece + 1];
    const int64_t end = least(first_panel + kAdapterPanels, divided_up(num_outputs, kAdapterPanel));
    const W* const of_piece = b_of<W>(group.slot, piece);
    AdapterFetch nothing{nullptr, 0, 0};
    AdapterTile<W> tile{};
    tile.depth = rank;
    for (int64_t panel = first_panel; panel < end; panel += kAdapterAtOnce) {
      const int64_t num_panels = least(kAdapterAtOnce, end - panel);
      for (int64_t i = 0; i < num_panels; ++i) {
        tile.panels[i] = of_piece + (panel + i) * rank * kAdapterPanel;
        tile.places[i] = first_output + (panel + i) * kAdapterPanel;
      }
      tile.last_width = least(kAdapterPanel, num_outputs - (panel + num_panels - 1) * kAdapterPanel);
      for (int64_t first = group.first; first < group.first + group.count; first += kAdapterRows) {
        const int64_t count = least(kAdapterRows, group.first + group.count - first);
        for (int64_t i = 0; i < count; ++i) {
          tile.rows[i] = shrunk + (first + i) * shrunk_stride() + piece * a.max_rank;
          tile.out[i] = a.out + order[first + i] * a.out_stride;
        }
        multiply_adapter_rows(tile, count, num_panels, nothing);
      }
    }
  }
};

template <class W>
static void adapters_thread(void* data, int thread, const Team& team) {
  const auto& job = *static_cast<const AdapterJob*>(data);
  const AdapterArgs& a = *job.args;
  const auto share = [&](int64_t count) { return count * thread / team.num_threads; };
  const auto end_of_share = [&](int64_t count) { return count * (thread + 1) / team.num_threads; };
  const AdapterGroup* group = job.groups;
  const AdapterGroup* const last = job.groups + job.num_groups - 1;
  for (int64_t tile = share(job.num_tiles); tile < end_of_share(job.num_tiles); ++tile) {
    while (group < last && group[1].first_tile <= tile) ++group;
    job.template shrink<W>(*group, tile - group->first_tile);
  }
  team.barrier();
  int64_t per_group = 0;
  for (int64_t piece = 0; piece < a.num_pieces; ++piece)
    per_group += divided_up(a.pieces[3 * piece + 1], kAdapterPanel * kAdapterPanels);
  const int64_t num_chunks = job.num_groups * per_group;
  for (int64_t i = share(num_chunks); i < end_of_share(num_chunks); ++i) {
    int64_t chunk = i % per_group, piece = 0;
    for (;; ++piece) {
      const int64_t of_piece = divided_up(a.pieces[3 * piece + 1], kAdapterPanel * kAdapterPanels);
      if (chunk < of_piece) break;
      chunk -= of_piece;
    }
    job.template expand<W>(job.groups[i / per_group], piece, chunk * kAdapterPanels);
  }
}

static bool adapters(const AdapterArgs& a) {
  static thread_local Scratch scratch;
  AdapterJob job{};
  if (!job.sort(a, scratch)) return false;
  if (job.num_groups == 0) return true;
  switch (a.weight_type) {
    case WeightType::kFloat16: run_parallel(a.num_threads, adapters_thread<Float16>, &job); break;
    case WeightType::kBfloat16: run_parallel(a.num_threads, adapters_thread<Bfloat16>, &job); break;
    default: run_parallel(a.num_threads, adapters_thread<float>, &job);
  }
  return true;
}

}  // namespace PENSTOCK_NAMESPACE
