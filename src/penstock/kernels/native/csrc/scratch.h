// Per-thread scratch memory, kept from call to call and aligned to cache lines.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace penstock {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  // At least `count` uninitialised floats; nullptr when allocation fails. Valid until the next call.
  float* get(size_t count) {
    if (count > capacity_) {
      std::free(memory_);
      capacity_ = 0;
      size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
      memory_ = static_cast<float*>(std::aligned_alloc(64, bytes));
      if (memory_ == nullptr) return nullptr;
      capacity_ = count;
    }
    return memory_;
  }

 private:
  float* memory_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace penstock
