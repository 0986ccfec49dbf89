// AVX-512: of 32 registers of 16 floats, a tile of 12 rows by 2 vectors uses 27, and 24 for its accumulators with
// quantised weights, for which it has no byte dot products.
#include "every_instruction_set.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define PENSTOCK_NAME "avx512"
#define PENSTOCK_LANES 16
#define PENSTOCK_TILE_ROWS 12

#define PENSTOCK_NAMESPACE penstock::avx512
#define PENSTOCK_PANEL_VECTORS 2
#define PENSTOCK_FMA_REGISTER "v"
#define PENSTOCK_WIDEN_FLOAT16(h) \
  __builtin_ia32_vcvtph2ps512_mask((short __attribute__((vector_size(32))))(h), penstock::avx512::Vec{}, -1, 4)
#include "kernels.inl"
#undef PENSTOCK_NAMESPACE

#define PENSTOCK_NAMESPACE penstock::quantized_avx512
#define PENSTOCK_QUANTIZED_TILE_ROWS 8
#define PENSTOCK_DOT_QUADS 0
#include "quantized.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const penstock::Kernels* penstock::avx512_kernels() { return &penstock::avx512::kTable; }
const penstock::QuantizedKernels* penstock::quantized_avx512_kernels() { return &penstock::quantized_avx512::kQuantizedTable; }
#else
const penstock::Kernels* penstock::avx512_kernels() { return nullptr; }
const penstock::QuantizedKernels* penstock::quantized_avx512_kernels() { return nullptr; }
#endif
