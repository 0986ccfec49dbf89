// Compiled, but not tested yet: no machine with it was at hand. AVX-512: 32 registers of 16 floats, of which a tile of 12 rows by 2 vectors uses 27.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif

#define PENSTOCK_NAME "avx512"
#define PENSTOCK_NAMESPACE penstock::avx512
#define PENSTOCK_LANES 16
#define PENSTOCK_PANEL_VECTORS 2
#define PENSTOCK_TILE_ROWS 12
#include "kernels.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const penstock::Kernels* penstock::avx512_kernels() { return &penstock::avx512::kTable; }
#else
const penstock::Kernels* penstock::avx512_kernels() { return nullptr; }
#endif
