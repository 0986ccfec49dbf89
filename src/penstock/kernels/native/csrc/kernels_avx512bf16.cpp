// AVX-512 with BF16: products of bfloat16 pairs in one instruction. Everything else equals AVX-512 bit for bit.
#include "every_instruction_set.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#endif

#define PENSTOCK_NAME "avx512"
#define PENSTOCK_LANES 16
#define PENSTOCK_TILE_ROWS 12

#define PENSTOCK_NAMESPACE penstock::avx512bf16
#define PENSTOCK_PANEL_VECTORS 2
#define PENSTOCK_FMA_REGISTER "v"
#define PENSTOCK_PAIR_PRODUCTS
#define PENSTOCK_WIDEN_FLOAT16(h) \
  __builtin_ia32_vcvtph2ps512_mask((short __attribute__((vector_size(32))))(h), penstock::avx512bf16::Vec{}, -1, 4)
#include "kernels.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const penstock::Kernels* penstock::avx512bf16_kernels() { return &penstock::avx512bf16::kTable; }
#else
const penstock::Kernels* penstock::avx512bf16_kernels() { return nullptr; }
#endif
