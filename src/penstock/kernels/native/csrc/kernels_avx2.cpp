// AVX2 with fused multiply-add: 16 registers of 8 floats, of which a tile of 6 rows by 2 vectors uses 15.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"
#include "shares.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define PENSTOCK_NAME "avx2"
#define PENSTOCK_NAMESPACE penstock::avx2
#define PENSTOCK_LANES 8
#define PENSTOCK_PANEL_VECTORS 2
#define PENSTOCK_TILE_ROWS 6
#define PENSTOCK_FMA_REGISTER "x"
#define PENSTOCK_WIDEN_FLOAT16(h) __builtin_ia32_vcvtph2ps256((short __attribute__((vector_size(16))))(h))
#include "kernels.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const penstock::Kernels* penstock::avx2_kernels() { return &penstock::avx2::kTable; }
#else
const penstock::Kernels* penstock::avx2_kernels() { return nullptr; }
#endif
