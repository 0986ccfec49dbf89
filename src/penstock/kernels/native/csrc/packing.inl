// Packing of weights in panels, and rows of packed weights and of plain tables.

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

template <class W>
static void pack_panels(const void* from, int64_t out_features, int64_t in_features, void* to) {
  const W* weight = static_cast<const W*>(from);
  W* packed = static_cast<W*>(to);
  const int64_t padded_outputs = divided_up(out_features, kPanelOf<W>) * kPanelOf<W>;
  const int64_t depth = packed_depth<W>(in_features);
  for (int64_t first = 0; first < padded_outputs; first += kPanelOf<W>)
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t n = first; n < first + kPanelOf<W>; ++n)
        packed[place<W>(n, k, in_features)] = n < out_features && k < in_features ? weight[n * in_features + k] : W{};
}

template <class W>
static void unpack_panels(const void* from, int64_t out_features, int64_t in_features, void* to) {
  const W* packed = static_cast<const W*>(from);
  W* weight = static_cast<W*>(to);
  for (int64_t n = 0; n < out_features; ++n)
    for (int64_t k = 0; k < in_features; ++k) weight[n * in_features + k] = packed[place<W>(n, k, in_features)];
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

static void pack_weight(const void* weight, int64_t out_features, int64_t in_features, WeightType type, void* packed) {
  const int64_t depth = elements(in_features, type);
  with_type(type, [&](auto w) { pack_panels<decltype(w)>(weight, out_features, depth, packed); });
}

static void unpack_weight(const void* packed, int64_t out_features, int64_t in_features, WeightType type, void* weight) {
  const int64_t depth = elements(in_features, type);
  with_type(type, [&](auto w) { unpack_panels<decltype(w)>(packed, out_features, depth, weight); });
}

}  // namespace PENSTOCK_NAMESPACE
