// Packing of weights in panels, and rows of packed weights and of plain tables.
#include "transpose.inl"

namespace PENSTOCK_NAMESPACE {

// Inner elements of a packed weight.
template <class W>
PENSTOCK_INLINE int64_t packed_depth(int64_t in_features) {
  return kIsTilePair<W> ? padded_pairs(in_features) : in_features;
}

template <class W>
PENSTOCK_INLINE int64_t place(int64_t n, int64_t k, int64_t in_features) {
  if constexpr (kIsTilePair<W>) return place_in_tiles(n, k, in_features);
  return n / kPanel * in_features * kPanel + k * kPanel + place_in_panel<W>(n % kPanel);
}

// Outputs of a square, of which a lane has one element of four bytes or two of two bytes.
template <class W>
constexpr int64_t kSquareOutputs = kLanes * 4 / sizeof(W);

// Packs the inner elements k to k + kLanes - 1 of the outputs from n on.
template <class W>
PENSTOCK_INLINE void pack_square(const W* weight, int64_t in_features, int64_t n, int64_t k, W* packed) {
  const W* const from = weight + n * in_features + k;
  UintVec rows[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    if constexpr (sizeof(W) == 4) {
      std::memcpy(&rows[i], from + i * in_features, sizeof rows[i]);
    } else {
      // The outputs whose elements are neighbours.
      const bool in_order = place_in_panel<W>(1) == 1;
      HalfVec first, second;
      std::memcpy(&first, from + (in_order ? 2 * i : i) * in_features, sizeof first);
      std::memcpy(&second, from + (in_order ? 2 * i + 1 : i + kLanes) * in_features, sizeof second);
      rows[i] = __builtin_convertvector(first, UintVec) | __builtin_convertvector(second, UintVec) << 16;
    }
  }
  transpose(rows);
  for (int i = 0; i < kLanes; ++i) std::memcpy(packed + place<W>(n, k + i, in_features), &rows[i], sizeof rows[i]);
}

template <class W>
static void pack_panel(const PackArgs& a, int64_t depth, int64_t panel) {
  const W* weight = static_cast<const W*>(a.from);
  W* packed = static_cast<W*>(a.to);
  const int64_t first = panel * kPanelOf<W>, end = first + kPanelOf<W>;
  const int64_t whole = end <= a.out_features ? depth / kLanes * kLanes : 0;
  for (int64_t k = 0; k < whole; k += kLanes)
    for (int64_t n = first; n < end; n += kSquareOutputs<W>) pack_square(weight, depth, n, k, packed);
  for (int64_t k = whole; k < packed_depth<W>(depth); ++k)
    for (int64_t n = first; n < end; ++n)
      packed[place<W>(n, k, depth)] = n < a.out_features && k < depth ? weight[n * depth + k] : W{};
}

template <class W>
static void unpack_panel(const PackArgs& a, int64_t depth, int64_t panel) {
  const W* packed = static_cast<const W*>(a.from);
  W* weight = static_cast<W*>(a.to);
  const int64_t first = panel * kPanelOf<W>;
  for (int64_t n = first; n < least(first + kPanelOf<W>, a.out_features); ++n)
    for (int64_t k = 0; k < depth; ++k) weight[n * depth + k] = packed[place<W>(n, k, depth)];
}

PENSTOCK_INLINE float widen(float x) { return x; }
PENSTOCK_INLINE float widen(Bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
PENSTOCK_INLINE float widen(Float16 x) {
  Float16 lanes[kLanes] = {x};
  return load(lanes)[0];
}

template <class W>
PENSTOCK_INLINE void widen_to(float* out, W x) {
  *out = widen(x);
}
template <class Pair>
PENSTOCK_INLINE void widen_pair_to(float* out, Pair x) {
  out[0] = widen(Bfloat16{x.first});
  out[1] = widen(Bfloat16{x.second});
}
PENSTOCK_INLINE void widen_to(float* out, Bfloat16Pair x) { widen_pair_to(out, x); }
PENSTOCK_INLINE void widen_to(float* out, TilePair x) { widen_pair_to(out, x); }

template <class W>
static void rows_thread(void* data, int thread, const Team& team) {
  const auto& a = *static_cast<const RowsArgs*>(data);
  const int64_t begin = a.num_ids * thread / team.num_threads, end = a.num_ids * (thread + 1) / team.num_threads;
  for (int64_t i = begin; i < end; ++i) {
    constexpr int64_t kSize = kIsPair<W> || kIsTilePair<W> ? 2 : 1;  // features of an element
    const W* weight = static_cast<const W*>(a.weight);
    const int64_t elements = a.in_features / kSize;
    float* out = a.out + i * a.in_features;
    for (int64_t k = 0; k < elements; ++k, out += kSize) widen_to(out, weight[place<W>(a.ids[i], k, elements)]);
  }
}

static void rows(const RowsArgs& a) {
  RowsArgs args = a;
  const int num_threads = a.num_ids < 4 ? 1 : a.num_threads;
  with_type(a.weight_type, [&](auto w) { run_parallel(num_threads, rows_thread<decltype(w)>, &args); });
}

PENSTOCK_INLINE void widen_row(const float* from, int64_t size, float* to) {
  std::memcpy(to, from, static_cast<size_t>(size) * sizeof(float));
}
PENSTOCK_INLINE void widen_row(const Bfloat16* from, int64_t size, float* to) {
  for (int64_t k = 0; k < size; ++k) to[k] = widen(from[k]);
}
PENSTOCK_INLINE void widen_row(const Float16* from, int64_t size, float* to) {
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) store(to + k, load(from + k));
  for (; k < size; ++k) to[k] = widen(from[k]);
}

template <class W>
static void lookup_thread(void* data, int thread, const Team& team) {
  const auto& a = *static_cast<const LookupArgs*>(data);
  const int64_t begin = a.num_ids * thread / team.num_threads, end = a.num_ids * (thread + 1) / team.num_threads;
  const W* table = static_cast<const W*>(a.table);
  for (int64_t i = begin; i < end; ++i) widen_row(table + a.ids[i] * a.width, a.width, a.out + i * a.width);
}

static void lookup(const LookupArgs& a) {
  LookupArgs args = a;
  const int num_threads = a.num_ids < 4 ? 1 : a.num_threads;
  with_type(a.weight_type, [&](auto w) {
    using W = decltype(w);
    if constexpr (!kIsPair<W> && !kIsTilePair<W>) run_parallel(num_threads, lookup_thread<W>, &args);
  });
}

// Elements for which a second thread pays.
constexpr int64_t kPackedPerThread = 64 * 1024;

struct PackJob {
  const PackArgs* args;
  int64_t next_panel;
};

template <class W, void (*kConvert)(const PackArgs&, int64_t, int64_t)>
static void convert_thread(void* data, int, const Team&) {
  auto& job = *static_cast<PackJob*>(data);
  const PackArgs& a = *job.args;
  const int64_t depth = elements(a.in_features, a.weight_type), panels = divided_up(a.out_features, kPanelOf<W>);
  for (;;) {
    const int64_t panel = __atomic_fetch_add(&job.next_panel, 1, __ATOMIC_RELAXED);
    if (panel >= panels) return;
    kConvert(a, depth, panel);
  }
}

template <class W, void (*kConvert)(const PackArgs&, int64_t, int64_t)>
static void convert(const PackArgs& a) {
  PackJob job{&a, 0};
  const int64_t most = 1 + a.out_features * a.in_features / kPackedPerThread;
  run_parallel(static_cast<int>(least(a.num_threads, most)), convert_thread<W, kConvert>, &job);
}

static void pack_weight(const PackArgs& a) {
  with_type(a.weight_type, [&](auto w) { convert<decltype(w), pack_panel<decltype(w)>>(a); });
}

static void unpack_weight(const PackArgs& a) {
  with_type(a.weight_type, [&](auto w) { convert<decltype(w), unpack_panel<decltype(w)>>(a); });
}

}  // namespace PENSTOCK_NAMESPACE
