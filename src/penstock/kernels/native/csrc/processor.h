// Choice of kernels that this processor, and its operating system, can run.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace penstock {

bool can_run(const Kernels* kernels);

// Kernels by number, best first; nullptr for those that do not run here.
constexpr int kCandidates = 4;
const Kernels* candidate(int index);

// Whether this processor's instructions for pairs of bfloat16 do more products per second than those for floats. Intel's
// take twice the time of two of them, since its tiles are the fast ones.
bool has_fast_pairs();

// Chooses how this processor reads weights.
void choose_streams();

// Reason why a processor with AMX does not use its tiles; nullptr if it does, or has none. The first call asks Linux
// for permission, for all threads of the process, and compares products with those of the emulation.
const char* why_no_tiles();

// Whether two tables of kernels have the same products by tiles, bit for bit, on random numbers from these seeds.
bool multiply_tiles_alike(const Kernels* first, uint32_t first_seed, const Kernels* second, uint32_t second_seed);

}  // namespace penstock
