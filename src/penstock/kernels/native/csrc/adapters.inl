// LoRA adapters of a linear layer: out += scaling * B (A x), with the adapter of each row.
//
// Rows are grouped by adapter, so that each adapter is read once per step. Every output is one chain of FMAs over the
// inner dimension, whatever the other rows: a row's result is bit-exact alone and in any batch.

namespace PENSTOCK_NAMESPACE {

constexpr int kAdapterVectors = kAdapterPanel / kLanes;
// Rows multiplied with a panel at once, and panels of outputs that a thread takes at once.
constexpr int kAdapterRows = 4;
constexpr int64_t kAdapterPanels = 8;

PENSTOCK_INLINE Vec load_adapter(const float* from) { return load(from); }
PENSTOCK_INLINE Vec load_adapter(const Float16* from) { return load(from); }
PENSTOCK_INLINE Vec load_adapter(const Bfloat16* from) {
  HalfVec halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Vec)(__builtin_convertvector(halves, UintVec) << 16);
}

// A panel's products with R rows: sums[row][vector], over `depth` inner elements.
template <int R, class W>
PENSTOCK_INLINE void multiply_adapter_panel(const float* const* rows, const W* panel, int64_t depth,
                                            Vec (&sums)[kAdapterRows][kAdapterVectors]) {
  Vec kept[R][kAdapterVectors] = {};
  for (int64_t k = 0; k < depth; ++k, panel += kAdapterPanel) {
    Vec w[kAdapterVectors];
    for (int v = 0; v < kAdapterVectors; ++v) w[v] = load_adapter(panel + v * kLanes);
    for (int row = 0; row < R; ++row) {
      const Vec x = splat(rows[row][k]);
      for (int v = 0; v < kAdapterVectors; ++v) multiply_add(kept[row][v], x, w[v]);
    }
  }
  for (int row = 0; row < R; ++row)
    for (int v = 0; v < kAdapterVectors; ++v) sums[row][v] = kept[row][v];
}

template <class W>
PENSTOCK_INLINE void multiply_adapter_rows(const float* const* rows, int64_t count, const W* panel, int64_t depth,
                                           Vec (&sums)[kAdapterRows][kAdapterVectors]) {
  with_constant<kAdapterRows>(count, [&](auto height) {
    multiply_adapter_panel<decltype(height){}>(rows, panel, depth, sums);
  });
}

// Adds the first `width` sums of a panel.
PENSTOCK_INLINE void add_panel(float* out, const Vec (&sums)[kAdapterVectors], int64_t width) {
  if (width == kAdapterPanel) {
    for (int v = 0; v < kAdapterVectors; ++v) store(out + v * kLanes, load(out + v * kLanes) + sums[v]);
    return;
  }
  float lanes[kAdapterPanel];
  for (int v = 0; v < kAdapterVectors; ++v) store(lanes + v * kLanes, sums[v]);
  for (int64_t i = 0; i < width; ++i) out[i] += lanes[i];
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

  bool has_piece(int64_t slot) const {
    for (int64_t piece = 0; piece < args->num_pieces; ++piece)
      if (rank(slot, piece) > 0) return true;
    return false;
  }

  // A x of one tile of rows of a group.
  template <class W>
  void shrink(const AdapterGroup& group, int64_t tile, int64_t piece) const {
    const AdapterArgs& a = *args;
    const int64_t rank = this->rank(group.slot, piece);
    if (rank == 0) return;
    const int64_t first = group.first + tile * kAdapterRows;
    const int64_t count = least(kAdapterRows, group.first + group.count - first);
    const float* rows[kAdapterRows];
    for (int64_t i = 0; i < count; ++i) rows[i] = a.x + order[first + i] * a.x_stride;
    float* const out = shrunk + first * shrunk_stride() + piece * a.max_rank;
    const float scaling = a.scalings[group.slot * a.num_pieces + piece];
    if (a.a == nullptr) {
      for (int64_t i = 0; i < count; ++i)
        for (int64_t k = 0; k < rank; ++k) out[i * shrunk_stride() + k] = rows[i][k] * scaling;
      return;
    }
    const W* const of_piece =
        static_cast<const W*>(a.a) + (group.slot * a.num_pieces + piece) * a.max_rank * a.in_features;
    Vec sums[kAdapterRows][kAdapterVectors];
    for (int64_t k = 0; k < rank; k += kAdapterPanel) {
      multiply_adapter_rows(rows, count, of_piece + k * a.in_features, a.in_features, sums);
      for (int64_t i = 0; i < count; ++i)
        for (int v = 0; v < kAdapterVectors; ++v)
          store(out + i * shrunk_stride() + k + v * kLanes, sums[i][v] * splat(scaling));
    }
  }

  // Adds B (A x) of a group's rows for some panels of a piece's outputs.
  template <class W>
  void expand(const AdapterGroup& group, int64_t piece, int64_t first_panel) const {
    const AdapterArgs& a = *args;
    const int64_t rank = this->rank(group.slot, piece);
    const int64_t first_output = a.pieces[3 * piece], num_outputs = a.pieces[3 * piece + 1];
    const int64_t end = least(first_panel + kAdapterPanels, divided_up(num_outputs, kAdapterPanel));
    if (rank == 0) return;
    const W* const of_piece = static_cast<const W*>(a.b) + group.slot * a.b_size + a.pieces[3 * piece + 2];
    for (int64_t panel = first_panel; panel < end; ++panel) {
      const W* const weight = of_piece + panel * rank * kAdapterPanel;
      const int64_t output = panel * kAdapterPanel, width = least(kAdapterPanel, num_outputs - output);
      for (int64_t first = group.first; first < group.first + group.count; first += kAdapterRows) {
        const int64_t count = least(kAdapterRows, group.first + group.count - first);
        const float* rows[kAdapterRows];
        for (int64_t i = 0; i < count; ++i) rows[i] = shrunk + (first + i) * shrunk_stride() + piece * a.max_rank;
        Vec sums[kAdapterRows][kAdapterVectors];
        multiply_adapter_rows(rows, count, weight, rank, sums);
        for (int64_t i = 0; i < count; ++i)
          add_panel(a.out + order[first + i] * a.out_stride + first_output + output, sums[i], width);
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
  // Tiles of rows, piece by piece.
  const int64_t num_products = job.num_tiles * a.num_pieces;
  const AdapterGroup* group = job.groups;
  const AdapterGroup* const last = job.groups + job.num_groups - 1;
  for (int64_t i = share(num_products); i < end_of_share(num_products); ++i) {
    const int64_t tile = i / a.num_pieces;
    while (group < last && group[1].first_tile <= tile) ++group;
    job.template shrink<W>(*group, tile - group->first_tile, i % a.num_pieces);
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
  run_parallel(a.num_threads,
               for_type(a.weight_type, adapters_thread<float>, adapters_thread<Bfloat16>, adapters_thread<Float16>),
               &job);
  return true;
}

}  // namespace PENSTOCK_NAMESPACE
