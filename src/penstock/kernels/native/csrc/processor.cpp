#include "processor.h"

#include "tile_choices.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace penstock {
namespace {

// AMX-BF16, AMX-TILE and AMX-INT8.
bool has_amx() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kNeeded) == kNeeded;
#else
  return false;
#endif
}

// Linux gives a process the use of tiles when it asks.
bool is_permitted() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

class Random {
 public:
  explicit Random(uint32_t seed) : state_(seed * 2654435761u + 1) {}

  uint32_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 17;
    return state_ ^= state_ << 5;
  }
  // Of either sign, from 2^-8 to 2^8; one in 16 of them denormal.
  float number() {
    const uint32_t drawn = bits(), exponent = drawn % 16 == 0 ? 0 : 119 + (drawn >> 4) % 16;
    const uint32_t number = (bits() & 0x807fffffu) | exponent << 23;
    float value;
    std::memcpy(&value, &number, sizeof value);
    return value;
  }

 private:
  uint32_t state_;
};

constexpr int64_t kMostRows = 37, kOutputs = 70, kInputs = 1102;
constexpr int64_t kPackedWeight = 96 * 1120;  // with the padding of tiles

struct TileProducts {
  float x[kMostRows * kInputs];
  uint16_t weight[kOutputs * kInputs];
  alignas(64) uint16_t packed[kPackedWeight];
  float out[kMostRows * kOutputs];

  bool multiply(const Kernels* kernels, int64_t rows, uint32_t seed) {
    Random random(seed);
    for (float& value : x) value = random.number();
    for (uint16_t& value : weight) {
      const float number = random.number();
      std::memcpy(&value, reinterpret_cast<const char*>(&number) + 2, sizeof value);
    }
    kernels->pack_weight({weight, packed, kOutputs, kInputs, WeightType::kBfloat16Tiles, 1});
    return kernels->linear(
        {x, kInputs, packed, nullptr, out, kOutputs, rows, kInputs, kOutputs, WeightType::kBfloat16Tiles, 1});
  }
};

}  // namespace

bool multiply_tiles_alike(const Kernels* first, uint32_t first_seed, const Kernels* second, uint32_t second_seed) {
  auto* both = static_cast<TileProducts*>(std::aligned_alloc(64, (2 * sizeof(TileProducts) + 63) / 64 * 64));
  if (both == nullptr) return false;
  const int64_t num_rows[] = {1, 16, kMostRows};
  bool are_alike = true;
  for (const int64_t rows : num_rows)
    are_alike = are_alike && both[0].multiply(first, rows, first_seed) && both[1].multiply(second, rows, second_seed) &&
                std::memcmp(both[0].out, both[1].out, rows * kOutputs * sizeof(float)) == 0;
  std::free(both);
  return are_alike;
}

bool can_run(const Kernels* kernels) {
  if (kernels == nullptr) return false;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (kernels == amx_kernels()) return can_run(avx512bf16_kernels()) && has_amx() && why_no_tiles() == nullptr;
  if (kernels == avx512_kernels())
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (kernels == avx512bf16_kernels()) return can_run(avx512_kernels()) && __builtin_cpu_supports("avx512bf16");
  if (kernels == avx2_kernels())
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // these have F16C too
#endif
  return kernels == generic_kernels();
}

const Kernels* candidate(int index) {
  // AVX-512 is one instruction set, with or without BF16: all but bfloat16 arithmetic is the same.
  const Kernels* avx512 = can_run(avx512bf16_kernels()) ? avx512bf16_kernels() : avx512_kernels();
  const Kernels* all[kCandidates] = {amx_kernels(), avx512, avx2_kernels(), generic_kernels()};
  return index >= 0 && index < kCandidates && can_run(all[index]) ? all[index] : nullptr;
}

bool has_fast_pairs() {
#if defined(__x86_64__)
  return can_run(avx512bf16_kernels()) && !__builtin_cpu_is("intel");
#else
  return false;
#endif
}

void choose_streams() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // Measured on an Emerald Rapids: 94% of the memory bandwidth instead of 85%.
  if (__builtin_cpu_is("intel")) stream_choices = {2, 4 * 1024};
#endif
}

const char* why_no_tiles() {
  static const char* const reason = [] {
    if (!has_amx() || !can_run(avx512bf16_kernels())) return static_cast<const char*>(nullptr);
    if (!is_permitted()) return "the operating system refused their use (arch_prctl)";
    if (!multiply_tiles_alike(amx_kernels(), 1, avx512bf16_kernels(), 1))
      return "their products differ from Intel's definition";
    return static_cast<const char*>(nullptr);
  }();
  return reason;
}

}  // namespace penstock
