// AVX-512 with VNNI: dot products of four bytes per lane.
#include "every_instruction_set.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")
#endif

#define PENSTOCK_NAME "avx512vnni"
#define PENSTOCK_NAMESPACE penstock::quantized_avx512vnni
#define PENSTOCK_LANES 16
#define PENSTOCK_FMA_REGISTER "v"
#define PENSTOCK_QUANTIZED_TILE_ROWS 8
#define PENSTOCK_DOT_QUADS 1
#define PENSTOCK_WIDEN_FLOAT16(h) \
  __builtin_ia32_vcvtph2ps512_mask((short __attribute__((vector_size(32))))(h), Vec{}, -1, 4)
#include "quantized.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const penstock::QuantizedKernels* penstock::quantized_avx512vnni_kernels() { return &penstock::quantized_avx512vnni::kQuantizedTable; }
#else
const penstock::QuantizedKernels* penstock::quantized_avx512vnni_kernels() { return nullptr; }
#endif
