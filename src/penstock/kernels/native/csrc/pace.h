// Number of threads that a shared machine has room for.
#pragma once

#include <chrono>
#include <cstdint>

namespace penstock {

// Seconds of a monotonic clock.
inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Chooses the number of threads from the time that threads lose in waits for others that the operating system does not
// run. A thread that shares its core with another process is away for milliseconds, and all others wait for it in every
// product; without it they are faster.
//
// Threads are taken away one by one while more than a fifth of the time is lost, and are tried again after an interval
// that doubles with each try that fails.
class Pace {
 public:
  // Number of threads for the next region, at most `full`.
  int threads(int full, double now) {
    if (limit_ == 0 || limit_ >= full) return full;
    if (now < try_at_) return limit_;
    return limit_ + 1;
  }

  // Notes a region: its threads, its time, and the part of that time which was lost, in seconds.
  void note(int full, int threads, double time, double lost, double now) {
    if (threads < 2) return;
    if (threads != threads_) threads_ = threads, time_ = lost_ = 0;
    time_ += time;
    lost_ += lost;
    // A loss is certain as soon as it is a fifth of the window, whatever the rest of the window brings.
    const bool is_lossy = lost_ > kMostLost * kWindow;
    if (time_ < kWindow && !is_lossy) return;
    if (lost_ > kMostLost * time_) {
      interval_ = now - reduced_at_ > kMemory ? kShortest : 2 * interval_ < kLongest ? 2 * interval_ : kLongest;
      limit_ = threads - 1;
      reduced_at_ = now;
      try_at_ = now + interval_;
    } else if (limit_ != 0 && threads > limit_) {
      limit_ = threads < full ? threads : 0;
    }
    time_ = lost_ = 0;
  }

  int limit() const { return limit_; }

 private:
  static constexpr double kWindow = 8e-3, kMostLost = 0.2;
  static constexpr double kShortest = 0.1, kLongest = 3.0, kMemory = 10.0;

  int limit_ = 0;  // 0 for none
  int threads_ = 0;
  double time_ = 0, lost_ = 0;
  double interval_ = kShortest, try_at_ = 0, reduced_at_ = -kMemory;
};

}  // namespace penstock
