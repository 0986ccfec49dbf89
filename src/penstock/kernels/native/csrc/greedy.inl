// The output feature with the largest product, without writing the products down.
//
// Every product is that of `linear`, bit for bit, so the choice is the one that `argmax` makes of them.

namespace PENSTOCK_NAMESPACE {

// Products that a thread makes before it looks at them: they should stay in the first-level cache.
constexpr int64_t kProductsAtOnce = 6 * 1024;

// What is known of a row: the first of the largest so far, and the first that is not a number, or -1.
struct Best {
  float largest;
  int64_t index, not_a_number;
};

struct GreedyJob {
  const LinearArgs* args;
  Best* best;  // [threads][rows]
  bool* had_memory;  // [threads]
};

// Columns that begin at output feature `first`.
static void look_at(const float* products, int64_t columns, int64_t first, Best& best) {
  Vec most = splat(-__builtin_inff());
  IntVec is_nan = {};
  const int64_t whole = columns / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Vec v = load(products + i);
    most = max(v, most);
    is_nan |= v != v;
  }
  float largest = max_lanes(most);
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) has_nan |= is_nan[lane] != 0;
  for (int64_t i = whole; i < columns; ++i) {
    has_nan |= products[i] != products[i];
    if (products[i] > largest) largest = products[i];
  }
  if (has_nan && best.not_a_number < 0)
    for (int64_t i = 0; i < columns && best.not_a_number < 0; ++i)
      if (products[i] != products[i]) best.not_a_number = first + i;
  if (largest > best.largest) {
    int64_t i = 0;
    while (products[i] != largest) ++i;
    best.largest = largest;
    best.index = first + i;
  }
}

template <class W>
static void greedy_thread(void* data, int thread, const Team& team) {
  const auto& job = *static_cast<const GreedyJob*>(data);
  const LinearArgs& a = *job.args;
  const int64_t full_panels = a.out_features / kPanel, rest = a.out_features % kPanel;
  const int64_t begin = full_panels * thread / team.num_threads, end = full_panels * (thread + 1) / team.num_threads;
  const int64_t at_once = least(rows_at_once(a), a.rows);
  int64_t strip = kProductsAtOnce / at_once / kPanel;
  strip = strip < 4 ? 4 : strip;
  Best* best = job.best + thread * a.rows;
  for (int64_t row = 0; row < a.rows; ++row) best[row] = {-__builtin_inff(), begin * kPanel, -1};

  static thread_local Scratch scratch;
  float* products = scratch.get(static_cast<size_t>(at_once * strip * kPanel));
  job.had_memory[thread] = products != nullptr;
  if (products == nullptr) return;
  LinearArgs part = a;
  part.out_stride = strip * kPanel;
  for (int64_t first = 0; first < a.rows; first += at_once) {
    const int64_t rows = least(at_once, a.rows - first);
    const LinearArgs spread = spread_rows(a, first, rows);
    part.x = spread.x + first * spread.x_stride;
    part.x_stride = spread.x_stride;
    for (int64_t panel = begin; panel < end; panel += strip) {
      const int64_t last = end - panel < strip ? end : panel + strip;
      // Panels lie in the output at their own numbers.
      part.out = products - panel * kPanel;
      multiply_panels<W>(part, 0, rows, panel, last);
      for (int64_t row = 0; row < rows; ++row)
        look_at(products + row * part.out_stride, (last - panel) * kPanel, panel * kPanel, best[first + row]);
    }
    if (rest != 0 && thread == team.num_threads - 1) {
      part.out = products - full_panels * kPanel;
      multiply_edge<W>(part, 0, rows);
      for (int64_t row = 0; row < rows; ++row)
        look_at(products + row * part.out_stride, rest, full_panels * kPanel, best[first + row]);
    }
  }
}

static bool greedy(const GreedyArgs& g) {
  const LinearArgs& a = g.product;
  if (a.rows == 0) return true;
  static thread_local Scratch best_scratch;
  const size_t num_best = static_cast<size_t>(a.num_threads * a.rows);
  // Best is at least as strictly aligned as bool, which comes after.
  auto* memory = best_scratch.get((num_best * sizeof(Best) + a.num_threads) / sizeof(float) + 1);
  if (memory == nullptr) return false;
  auto* best = reinterpret_cast<Best*>(memory);
  auto* had_memory = reinterpret_cast<bool*>(best + num_best);
  // The runtime may grant fewer threads than asked for; the others then have found nothing.
  for (size_t i = 0; i < num_best; ++i) best[i] = {-__builtin_inff(), 0, -1};
  for (int thread = 0; thread < a.num_threads; ++thread) had_memory[thread] = true;
  GreedyJob job{&a, best, had_memory};
  run_parallel(a.num_threads,
               for_type(a.weight_type, greedy_thread<float>, greedy_thread<Bfloat16>, greedy_thread<Float16>), &job);
  for (int thread = 0; thread < a.num_threads; ++thread)
    if (!had_memory[thread]) return false;
  for (int64_t row = 0; row < a.rows; ++row) {
    Best found = best[row];
    for (int thread = 1; thread < a.num_threads; ++thread) {
      const Best& other = best[thread * a.rows + row];
      if (found.not_a_number < 0) found.not_a_number = other.not_a_number;
      if (other.largest > found.largest) found.largest = other.largest, found.index = other.index;
    }
    const bool has_nan = found.not_a_number >= 0;
    g.index[row] = has_nan ? found.not_a_number : found.index;
    g.failed[row] = has_nan || !__builtin_isfinite(found.largest);
  }
  return true;
}

}  // namespace PENSTOCK_NAMESPACE
