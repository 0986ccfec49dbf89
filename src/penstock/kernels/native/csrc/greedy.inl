// Greedy sampling fused with the LM head: argmax of a linear layer, without storing its output.
//
// Every product equals that of `linear` bit for bit, so the index equals that of `argmax` over them.

namespace PENSTOCK_NAMESPACE {

// Panels of products per argmax scan.
constexpr int64_t kPanelsLookedAt = 8;

// Running argmax of a row: the first of the largest values; NaN counts as largest.
struct Best {
  float largest;
  int64_t index;
};

constexpr Best kNothing = {-__builtin_inff(), INT64_MAX};

// Panels come in any order; of equal values the lowest index wins.
PENSTOCK_INLINE void note_largest(const Best& other, Best& best) {
  const bool is_nan = other.largest != other.largest, was_nan = best.largest != best.largest;
  const bool is_larger = is_nan ? !was_nan : other.largest > best.largest;
  const bool is_equal = is_nan ? was_nan : other.largest == best.largest;
  if (is_larger || (is_equal && other.index < best.index)) best = other;
}

struct GreedyJob {
  const LinearArgs* args;
  PanelShares panels;
  Best* best;  // [threads][rows]
  bool* had_memory;  // [threads]
};

// Updates `best` with columns that begin at output feature `first`.
static void look_at(const float* products, int64_t columns, int64_t first, Best& best) {
  float largest;
  bool has_nan;
  scan(products, columns, &largest, &has_nan);
  if (!has_nan && !(largest >= best.largest)) return;
  const int64_t column = find(products, largest, has_nan);
  note_largest({products[column], first + column}, best);
}

template <class W>
static void greedy_thread(void* data, int thread, const Team& team) {
  auto& job = *static_cast<GreedyJob*>(data);
  const LinearArgs& a = *job.args;
  constexpr int64_t kWidth = kPanelOf<W>;
  const int64_t full_panels = a.out_features / kWidth, rest = a.out_features % kWidth;
  const int64_t chunk_rows = job.panels.chunk_rows;
  Best* best = job.best + thread * a.rows;

  job.panels.round_rows_together<W>(a, thread, team);
  static thread_local Scratch scratch;
  float* products = scratch.get(static_cast<size_t>(least(chunk_rows, a.rows) * kPanelsLookedAt * kWidth));
  job.had_memory[thread] = products != nullptr;
  if (products == nullptr) return;
  LinearArgs part = a;
  part.out_stride = kPanelsLookedAt * kWidth;
  int64_t chunk = -1;
  job.panels.take_turns(thread, [&](const PanelShares::Turn& turn) {
    const int64_t first = turn.chunk * chunk_rows, rows = least(chunk_rows, a.rows - first);
    if (turn.chunk != chunk) {
      const LinearArgs spread = job.panels.prepare_rows<W>(a, thread, first, rows);
      part.x = spread.x + first * spread.x_stride;
      part.x_stride = spread.x_stride;
      chunk = turn.chunk;
    }
    bool has_edge;
    const Panels full = turn.panels.without(full_panels, has_edge);
    multiply_panels<W>(part, 0, rows, full, products, kWidth);
    // Adjacent panels are scanned together.
    const int64_t together = full.apart == 1 ? full.count : 1;
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < full.count; i += together)
        look_at(products + row * part.out_stride + i * kWidth, together * kWidth, full.at(i) * kWidth,
                best[first + row]);
    if (has_edge) {
      part.out = products - full_panels * kWidth;
      multiply_edge<W>(part, 0, rows);
      for (int64_t row = 0; row < rows; ++row)
        look_at(products + row * part.out_stride, rest, full_panels * kWidth, best[first + row]);
    }
  });
}

template <class W>
static bool greedy_of(const GreedyArgs& g) {
  const LinearArgs a = in_elements(g.product);
  if (a.rows == 0) return true;
  static thread_local Scratch best_scratch, shares_scratch;
  const size_t num_best = static_cast<size_t>(a.num_threads * a.rows);
  // Best is at least as strictly aligned as bool, which comes after.
  auto* memory = best_scratch.get((num_best * sizeof(Best) + a.num_threads) / sizeof(float) + 1);
  if (memory == nullptr) return false;
  auto* best = reinterpret_cast<Best*>(memory);
  auto* had_memory = reinterpret_cast<bool*>(best + num_best);
  for (size_t i = 0; i < num_best; ++i) best[i] = kNothing;
  for (int thread = 0; thread < a.num_threads; ++thread) had_memory[thread] = true;
  GreedyJob job{&a, {}, best, had_memory};
  if (!job.panels.divide(a, kPanelsLookedAt, shares_scratch)) return false;
  run_parallel(a.num_threads, greedy_thread<W>, &job);
  for (int thread = 0; thread < a.num_threads; ++thread)
    if (!had_memory[thread]) return false;
  for (int64_t row = 0; row < a.rows; ++row) {
    Best found = best[row];
    for (int thread = 1; thread < a.num_threads; ++thread) note_largest(best[thread * a.rows + row], found);
    g.index[row] = found.index;
    g.failed[row] = !__builtin_isfinite(found.largest);
    if (g.largest != nullptr) g.largest[row] = found.largest;
  }
  return true;
}

static bool greedy(const GreedyArgs& g) {
  return with_type(g.product.weight_type, [&](auto w) { return greedy_of<decltype(w)>(g); });
}

}  // namespace PENSTOCK_NAMESPACE
