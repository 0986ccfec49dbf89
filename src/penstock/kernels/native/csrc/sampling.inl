// Drawing tokens by inversion of the cumulative distribution; a row's number comes from its seed and position alone.

namespace PENSTOCK_NAMESPACE {

// Weights are summed in blocks of so many, so that the search need look into one block only.
constexpr int64_t kDrawBlock = 512;

// SplitMix64; the same bits as kernels/random.py.
PENSTOCK_INLINE uint64_t mix(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  return bits ^ (bits >> 31);
}

PENSTOCK_INLINE double counter_uniform(int64_t seed, int64_t position) {
  const uint64_t bits =
      mix(mix(static_cast<uint64_t>(seed)) + (static_cast<uint64_t>(position) + 1) * 0x9E3779B97F4A7C15u);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

// e^(x - most) of up to a block's values, and their sum. The last vector is filled up with zeros.
PENSTOCK_INLINE float weigh(const float* x, int64_t size, float most, float* weights) {
  Vec sum = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec w = exp(load(x + i) - most);
    store(weights + i, w);
    sum += w;
  }
  if (i < size) {
    float rest[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) rest[lane] = i + lane < size ? x[i + lane] : -__builtin_inff();
    const Vec w = exp(load(rest) - most);
    store(weights + i, w);
    sum += w;
  }
  return sum_lanes(sum);
}

// The first token at which the cumulative weight exceeds `target`, short of rounding; never one without weight.
PENSTOCK_INLINE int64_t search(const float* x, int64_t size, float most, double target) {
  float weights[kDrawBlock + kLanes];
  double before = 0.0;
  int64_t last = 0;
  for (int64_t start = 0; start < size; start += kDrawBlock) {
    const int64_t count = size - start < kDrawBlock ? size - start : kDrawBlock;
    const double after = before + static_cast<double>(weigh(x + start, count, most, weights));
    if (after > target || start + kDrawBlock >= size) {
      double cumulative = before;
      for (int64_t i = 0; i < count; ++i) {
        if (weights[i] == 0.0f) continue;
        last = start + i;
        cumulative += static_cast<double>(weights[i]);
        if (cumulative > target) break;
      }
      // In a last block without any weight, it is the one before that has the last token.
      if (last >= start || start == 0) return last;
    }
    if (after > before)
      for (int64_t i = count - 1; i >= 0; --i)
        if (weights[i] != 0.0f) {
          last = start + i;
          break;
        }
    before = after;
  }
  return last;
}

static void draw_thread(void* data, int thread, const Team& team) {
  const auto& a = *static_cast<const DrawArgs*>(data);
  const int64_t begin = a.rows * thread / team.num_threads, end = a.rows * (thread + 1) / team.num_threads;
  float weights[kDrawBlock + kLanes];
  for (int64_t row = begin; row < end; ++row) {
    const float* x = a.x + row * a.size;
    float most = -__builtin_inff();
    bool has_nan = false;
    scan(x, a.size, &most, &has_nan);
    a.failed[row] = has_nan || !__builtin_isfinite(most);
    a.index[row] = 0;
    if (a.failed[row]) continue;
    double total = 0.0;
    for (int64_t start = 0; start < a.size; start += kDrawBlock)
      total += static_cast<double>(
          weigh(x + start, a.size - start < kDrawBlock ? a.size - start : kDrawBlock, most, weights));
    a.index[row] = search(x, a.size, most, counter_uniform(a.seeds[a.slots[row]], a.positions[row]) * total);
  }
}

static void draw(const DrawArgs& a) {
  DrawArgs args = a;
  run_parallel(threads_for(a.rows * a.size, a.rows, a.num_threads), draw_thread, &args);
}

}  // namespace PENSTOCK_NAMESPACE
