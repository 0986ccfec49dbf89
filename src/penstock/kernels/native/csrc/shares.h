// Work stealing among threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// Numbered work items. Each thread starts with a range of them and takes it in order; a thread that has finished its
// range steals the second half of another thread's remaining range. So no thread waits for longer than a few items
// take, even where a core is slower or was preempted; and usually each thread reads its own range in order.
//
// The ranges of threads that never start are stolen by the other threads.
class Shares {
 public:
  struct Pieces {
    int64_t begin, end;
  };

  // Floats of memory for `divide`, aligned to cache lines.
  static constexpr size_t floats_for(int num_threads) { return num_threads * sizeof(Slot) / sizeof(float); }

  // num_threads ranges of `count` items, one after the other; fewer than 2^32 in all.
  void divide(float* memory, int num_threads, int64_t count) {
    slots_ = reinterpret_cast<Slot*>(memory);
    num_threads_ = num_threads;
    for (int thread = 0; thread < num_threads; ++thread)
      __atomic_store_n(&slots_[thread].range, packed({thread * count, (thread + 1) * count}), __ATOMIC_RELAXED);
  }

  // Takes up to `most` adjacent items; false when none are left.
  bool take(int thread, int64_t most, Pieces& taken) {
    do {
      uint64_t range = __atomic_load_n(&slots_[thread].range, __ATOMIC_RELAXED);
      for (Pieces left = unpacked(range); left.begin < left.end; left = unpacked(range)) {
        const int64_t end = left.end - left.begin < most ? left.end : left.begin + most;
        if (!replace(thread, range, {end, left.end})) continue;
        taken = {left.begin, end};
        return true;
      }
    } while (take_over(thread, most));
    return false;
  }

 private:
  // On its own cache line: usually a single thread writes to it.
  struct alignas(64) Slot {
    uint64_t range;
  };

  static uint64_t packed(Pieces pieces) {
    return static_cast<uint64_t>(pieces.begin) << 32 | static_cast<uint64_t>(pieces.end);
  }
  static Pieces unpacked(uint64_t range) {
    return {static_cast<int64_t>(range >> 32), static_cast<int64_t>(range & 0xffffffffu)};
  }

  // Compare-and-swap of a slot; on failure `range` becomes its current value.
  bool replace(int thread, uint64_t& range, Pieces pieces) {
    return __atomic_compare_exchange_n(&slots_[thread].range, &range, packed(pieces), false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
  }

  // Steals the second half of the longest remaining range; false when no items are left.
  bool take_over(int thread, int64_t most) {
    while (true) {
      int slowest = -1;
      uint64_t range = 0;
      int64_t longest = 0;
      for (int other = 0; other < num_threads_; ++other) {
        const uint64_t found = __atomic_load_n(&slots_[other].range, __ATOMIC_RELAXED);
        const Pieces left = unpacked(found);
        if (left.end - left.begin > longest) longest = left.end - left.begin, slowest = other, range = found;
      }
      if (slowest < 0) return false;
      const Pieces left = unpacked(range);
      const int64_t kept = longest / 2 / most * most;  // whole turns of the victim
      if (!replace(slowest, range, {left.begin, left.begin + kept})) continue;
      // An empty range, as this thread's own is, cannot be stolen from.
      __atomic_store_n(&slots_[thread].range, packed({left.begin + kept, left.end}), __ATOMIC_RELAXED);
      return true;
    }
  }

  Slot* slots_ = nullptr;
  int num_threads_ = 0;
};

}  // namespace penstock
