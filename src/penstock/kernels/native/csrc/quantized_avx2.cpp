// AVX2 with fused multiply-add: a tile of 6 rows by 2 vectors uses 12 of 16 registers for its sums.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "parallel.h"
#include "quantized.h"
#include "scratch.h"
#include "shares.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

#define PENSTOCK_NAME "avx2"
#define PENSTOCK_NAMESPACE penstock::quantized_avx2
#define PENSTOCK_LANES 8
#define PENSTOCK_TILE_ROWS 6
#define PENSTOCK_INT4_TILE_ROWS 4
#define PENSTOCK_DOT_QUADS 0
#include "quantized.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const penstock::QuantizedKernels* penstock::quantized_avx2_kernels() { return &penstock::quantized_avx2::kQuantizedTable; }
#else
const penstock::QuantizedKernels* penstock::quantized_avx2_kernels() { return nullptr; }
#endif
