// Attention in bfloat16 arithmetic over a bfloat16 KV cache.
//
// Scores and sums of values are the products of linear layers (linear.inl): queries and softmax weights, rounded to
// bfloat16, are the rows, and a tile's keys and values are packed as the weights, two dimensions or two positions at a
// time. So the order of sums is that of pairs (pairs.h) or of AMX's tiles (tile_registers.h): a score is one chain over
// the dimensions, and the sum of a tile's values one chain over its positions, which is then added to those of the
// tiles before it. Softmax is float32. What a query does not see is packed as zero, or has the weight zero.

namespace PENSTOCK_NAMESPACE {

// Element of a bfloat16 cache that is read for products of W: Bfloat16Pair or TilePair.
template <class W>
struct Paired {
  Bfloat16 element;
};

template <class T>
constexpr bool kIsPaired = false;
template <class W>
constexpr bool kIsPaired<Paired<W>> = true;

template <class W>
PENSTOCK_INLINE void narrow_one(float x, float, Paired<W>* to) {
  narrow_one(x, 1.0f, &to->element);
}

PENSTOCK_INLINE int64_t whole_panels(int64_t columns) { return divided_up(columns, kTilePanel) * kTilePanel; }
static_assert(kTilePanel % kPanel == 0, "a panel of tiles is whole panels of pairs");

// Pairs of a row of `size` elements, in whole tiles.
PENSTOCK_INLINE int64_t pairs_of(int64_t size) { return padded_pairs(divided_up(size, 2)); }

// A thread's packed keys and values of a part of a tile, and their products.
struct PackedPart {
  float* keys;      // [pairs of dimensions][positions], as a weight with an output per position
  float* values;    // [pairs of positions][dimensions]
  float* products;  // [rows][whole_panels(value_size)]

  static int64_t floats(const AttentionArgs& a, const Cut& cut, int64_t rows) {
    return pairs_of(a.head_size) * whole_panels(cut.part) + (pairs_of(cut.part) + rows) * whole_panels(value_size(a));
  }
  PackedPart(float* memory, const AttentionArgs& a, const Cut& cut)
      : keys(memory),
        values(keys + pairs_of(a.head_size) * whole_panels(cut.part)),
        products(values + pairs_of(cut.part) * whole_panels(value_size(a))) {}
};

// Pairs of a lane's elements in two rows.
template <class W>
PENSTOCK_INLINE Vec pairs_at(const Paired<W>* first, const Paired<W>* second) {
  const auto widened = [](const Paired<W>* row) { return (UintVec)widen(reinterpret_cast<const Bfloat16*>(row)); };
  return (Vec)(widened(first) >> 16 | widened(second));
}

template <class W>
PENSTOCK_INLINE W pair_at(const Paired<W>* first, const Paired<W>* second, int64_t c) {
  return {first == nullptr ? uint16_t{0} : first[c].element.bits,
          second == nullptr ? uint16_t{0} : second[c].element.bits};
}

// Packs the keys of a block as outputs from n on, and prefetches those of another block.
template <class W>
static void pack_keys(const AttentionArgs& a, const Paired<W>* keys, const Paired<W>* next, int64_t n, W* packed) {
  const int64_t pairs = pairs_of(a.head_size), whole = a.head_size / 2, count = a.block_size;
  int64_t c = 0;
  for (; n % kLanes == 0 && c + kLanes <= count; c += kLanes) {
    const Paired<W>* from = keys + c;
    const Paired<W>* later = next + c;
    for (int64_t k = 0; k < whole; ++k, from += 2 * count, later += 2 * count) {
      // Two rows of 16 positions are one cache line.
      __builtin_prefetch(later, 0, 2);
      if (count > kLanes) __builtin_prefetch(later + count, 0, 2);
      store(reinterpret_cast<float*>(packed + place<W>(n + c, k, pairs)), pairs_at(from, from + count));
    }
    for (int64_t k = whole; k < pairs; ++k) {
      const Paired<W>* const last = 2 * k < a.head_size ? keys + 2 * k * count : nullptr;
      for (int64_t i = c; i < c + kLanes; ++i) packed[place<W>(n + i, k, pairs)] = pair_at<W>(last, nullptr, i);
    }
  }
  for (; c < count; ++c)
    for (int64_t k = 0; k < pairs; ++k) {
      const Paired<W>* const first = 2 * k < a.head_size ? keys + 2 * k * count : nullptr;
      const Paired<W>* const second = 2 * k + 1 < a.head_size ? first + count : nullptr;
      packed[place<W>(n + c, k, pairs)] = pair_at<W>(first, second, c);
    }
}

// A request's values from a position on, one after the other, and those to prefetch meanwhile.
template <class W>
class ValueRows {
 public:
  // blocks, next: from the block of the position `first` on; num_next: of `next`, which may be fewer.
  ValueRows(const AttentionArgs& a, const int32_t* blocks, int64_t kv_head, const int32_t* next, int64_t num_next,
            int64_t next_kv_head, int64_t first)
      : a_(a), blocks_(blocks), next_(next), kv_head_(kv_head), next_kv_head_(next_kv_head), num_next_(num_next),
        offset_(first % a.block_size) {}

  const Paired<W>* take() {
    if (values_ == nullptr) enter();
    if (offset_ == a_.block_size) {
      ++blocks_, ++next_, --num_next_;
      offset_ = 0;
      enter();
    }
    if (later_ != nullptr)
      fetch_soon<false>(later_ + offset_ * a_.head_size, a_.head_size * static_cast<int64_t>(sizeof(Paired<W>)));
    return values_ + offset_++ * a_.head_size;
  }

 private:
  void enter() {
    values_ = block_at<Paired<W>>(a_, a_.value_cache, *blocks_, kv_head_);
    later_ = num_next_ > 0 ? block_at<Paired<W>>(a_, a_.value_cache, *next_, next_kv_head_) : nullptr;
  }

  const AttentionArgs& a_;
  const int32_t *blocks_, *next_;
  int64_t kv_head_, next_kv_head_, num_next_, offset_;
  const Paired<W> *values_ = nullptr, *later_ = nullptr;
};

// Packs the values of the positions seen .. stop of a part that begins at `start`; zeros before and after them.
template <class W>
static void pack_values(const AttentionArgs& a, ValueRows<W>& rows, int64_t start, int64_t seen, int64_t stop,
                        W* packed) {
  const int64_t pairs = pairs_of(stop - start);
  const auto row_at = [&](int64_t position) {
    return position >= seen && position < stop ? rows.take() : nullptr;
  };
  constexpr int64_t kWidth = kPanelOf<W>;
  static const Paired<W> zeros[kWidth] = {};
  const int64_t panel = place<W>(kWidth, 0, pairs), whole = a.head_size / kWidth * kWidth;
  for (int64_t k = 0; k < pairs; ++k) {
    const Paired<W>* const first = row_at(start + 2 * k);
    const Paired<W>* const second = row_at(start + 2 * k + 1);
    W* to = packed + place<W>(0, k, pairs);
    for (int64_t c = 0; c < whole; c += kWidth, to += panel)
      for (int64_t i = 0; i < kWidth; i += kLanes) {
        const Vec both = pairs_at(first == nullptr ? zeros : first + c + i, second == nullptr ? zeros : second + c + i);
        store(reinterpret_cast<float*>(to + place<W>(i, 0, pairs)), both);
      }
    for (int64_t c = whole; c < a.head_size; ++c) packed[place<W>(c, k, pairs)] = pair_at<W>(first, second, c);
  }
}

PENSTOCK_INLINE void multiply_rows(const LinearArgs& a, const Panels& panels, const Bfloat16Pair*) {
  multiply_panels<Bfloat16Pair>(a, 0, a.rows, panels, a.out, kPanel);
}
PENSTOCK_INLINE void multiply_rows(const LinearArgs& a, const Panels& panels, const TilePair*) {
  const TileRows x = TileRows::in_order(a.x, a.x_stride, RowTiles(a.rows).height);
  multiply_tile_panels(a, x, a.rows, panels, a.out, kTilePanel);
}

// out[row][n] = sum over k of x[row][k] * packed[n][k], for whole panels of `columns`. x: rows of `pairs` pairs, a
// multiple of those of a tile. Up to 15 rows of memory after the last one may be read.
template <class W>
static void multiply_packed(const float* x, int64_t x_stride, int64_t rows, int64_t pairs, const W* packed,
                            int64_t columns, float* out, int64_t out_stride) {
  LinearArgs a{};
  a.x = x;
  a.x_stride = x_stride;
  a.weight = packed;
  a.out = out;
  a.out_stride = out_stride;
  a.rows = rows;
  a.in_features = pairs;
  multiply_rows(a, {0, divided_up(columns, kPanelOf<W>), 1}, packed);
}

// Rounds a row in place to pairs, in whole tiles of them.
PENSTOCK_INLINE void round_in_place(float* row, int64_t size) {
  round_row(row, size / 2, reinterpret_cast<Bfloat16Pair*>(row));
  for (int64_t k = size / 2; k < pairs_of(size); ++k) row[k] = 0.0f;
}

// sums = sums * keep + products, for some rows. keep: nullptr for 1.
PENSTOCK_INLINE void add_products(const float* products, int64_t stride, const float* keep, int64_t rows, int64_t size,
                                  float* sums) {
  for (int64_t row = 0; row < rows; ++row, products += stride, sums += size) {
    const float kept = keep == nullptr ? 1.0f : keep[row];
    int64_t d = 0;
    for (; d + kLanes <= size; d += kLanes) {
      Vec sum = load(products + d);
      multiply_add(sum, load(sums + d), splat(kept));
      store(sums + d, sum);
    }
    for (; d < size; ++d) sums[d] = sums[d] * kept + products[d];
  }
}

}  // namespace PENSTOCK_NAMESPACE
