// Division of rows into tiles and of weights into panels, and prefetching.
#include <cstdint>

namespace PENSTOCK_NAMESPACE {

constexpr int64_t kCacheLine = 64;

constexpr PENSTOCK_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
PENSTOCK_INLINE int64_t divided_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }

template <int kValue>
struct Constant {
  constexpr operator int() const { return kValue; }
};

// Calls run(Constant<number>) for a runtime number; one above kMost counts as kMost.
template <int kMost, int kNext = 1, class Function>
PENSTOCK_INLINE void with_constant(int64_t number, const Function& run) {
  if constexpr (kNext < kMost)
    if (number != kNext) return with_constant<kMost, kNext + 1>(number, run);
  run(Constant<kNext>{});
}

// Calls run(Constant<i>) for i from kNext to kCount - 1.
template <int kCount, int kNext = 0, class Function>
PENSTOCK_INLINE void for_each(const Function& run) {
  if constexpr (kNext < kCount) {
    run(Constant<kNext>{});
    for_each<kCount, kNext + 1>(run);
  }
}

// Rows in tiles of nearly the same height: a low tile takes almost as long as one of full height.
struct Tiles {
  int64_t count, height, num_taller;  // num_taller: leading tiles with one more row

  Tiles(int64_t rows, int64_t tile_rows)
      : count(divided_up(rows, tile_rows)), height(rows / count), num_taller(rows % count) {}

  int64_t rows_of_taller() const { return num_taller * (height + 1); }

  struct Tile {
    int64_t start, height;
  };
  Tile at(int64_t tile) const {
    return {tile * height + least(tile, num_taller), tile < num_taller ? height + 1 : height};
  }
  // The tile of a row.
  Tile around(int64_t row) const {
    const int64_t above = rows_of_taller();
    return at(row < above ? row / (height + 1) : num_taller + (row - above) / height);
  }
};

// Every `apart`-th panel from the first on.
struct Panels {
  int64_t first, count, apart;

  int64_t at(int64_t i) const { return first + i * apart; }
  // Without the last panel if it is `edge`, the partial one; `has_edge` is set accordingly.
  Panels without(int64_t edge, bool& has_edge) const {
    has_edge = count > 0 && at(count - 1) == edge;
    return {first, count - has_edge, apart};
  }
};

// Panels taken several at once: each thread's share is divided into that many streams, and a turn takes one panel of
// each. So every stream is read sequentially: several streams give more memory bandwidth, and new starting points at
// every turn give less.
class PanelStreams {
 public:
  PanelStreams(int64_t num_panels, int num_threads, int64_t num_streams)
      : num_panels_(num_panels), panels_each_(divided_up(num_panels, num_threads)), num_streams_(num_streams) {}

  // Turns per thread.
  int64_t turns_each() const { return divided_up(panels_each_, num_streams_); }

  // The panels of a turn; the last threads may have turns without any.
  Panels at(int64_t turn) const {
    const int64_t first = turn / turns_each() * panels_each_;
    const int64_t panels = least(panels_each_, num_panels_ - first);
    const int64_t length = divided_up(panels, num_streams_), place = turn % turns_each();
    return place < length ? Panels{first + place, divided_up(panels - place, length), length} : Panels{0, 0, 1};
  }

 private:
  int64_t num_panels_, panels_each_, num_streams_;
};

// Memory to prefetch during a computation, `step` bytes per turn.
struct Fetch {
  const char* next;
  const char* end;
  int64_t step;  // bytes
  bool is_near;  // into the L1 cache rather than L2

  void turn() {
    const char* const stop = next + step < end ? next + step : end;
    if (is_near) {
      for (; next < stop; next += kCacheLine) __builtin_prefetch(next, 0, 3);
    } else {
      for (; next < stop; next += kCacheLine) __builtin_prefetch(next, 0, 2);
    }
  }

  void skip(int64_t turns) { next = next + turns * step < end ? next + turns * step : end; }
};

PENSTOCK_INLINE Fetch fetch_nothing() { return {nullptr, nullptr, 0, true}; }

PENSTOCK_INLINE Fetch fetch_in_turns(const void* from, int64_t bytes, int64_t turns, bool is_near) {
  const char* const first = static_cast<const char*>(from);
  return {first, first + bytes, divided_up(bytes, turns * kCacheLine) * kCacheLine, is_near};
}

}  // namespace PENSTOCK_NAMESPACE
