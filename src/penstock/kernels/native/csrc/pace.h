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
// Of n threads, one is taken away where more than 1 / n of the time is lost: then n - 1 do as much. It is tried again
// after an interval that doubles with each try that fails.
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
    lost_ += lost < time ? lost : time;
    if (time_ < (limit_ != 0 && threads > limit_ ? kTry : kWindow)) return;
    if (lost_ * threads > time_) {
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
  static constexpr double kWindow = 0.1, kTry = 0.02;
  static constexpr double kShortest = 0.1, kLongest = 3.0, kMemory = 10.0;

  int limit_ = 0;  // 0 for none
  int threads_ = 0;
  double time_ = 0, lost_ = 0;
  double interval_ = kShortest, try_at_ = 0, reduced_at_ = -kMemory;
};

}  // namespace penstock
