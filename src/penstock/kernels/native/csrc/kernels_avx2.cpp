// AVX2 with FMA: of 16 registers of 8 floats, a tile of 6 rows by 2 vectors uses 15, and 12 for its accumulators with
// quantised weights.
#include "every_instruction_set.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define PENSTOCK_NAME "avx2"
#define PENSTOCK_LANES 8
#define PENSTOCK_TILE_ROWS 6

#define PENSTOCK_NAMESPACE penstock::avx2
#define PENSTOCK_PANEL_VECTORS 2
#define PENSTOCK_FMA_REGISTER "x"
#define PENSTOCK_WIDEN_FLOAT16(h) __builtin_ia32_vcvtph2ps256((short __attribute__((vector_size(16))))(h))
#include "kernels.inl"
#undef PENSTOCK_NAMESPACE

#define PENSTOCK_NAMESPACE penstock::quantized_avx2
#define PENSTOCK_QUANTIZED_TILE_ROWS 4
#define PENSTOCK_DOT_QUADS 0
#include "quantized.inl"
#include "quantized_by_tiles.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const penstock::Kernels* penstock::avx2_kernels() { return &penstock::avx2::kTable; }
const penstock::QuantizedKernels* penstock::quantized_avx2_kernels() { return &penstock::quantized_avx2::kQuantizedTable; }

const penstock::QuantizedKernels* penstock::quantized_avx2_tiles_kernels() {
  namespace avx2 = penstock::quantized_avx2;
  const auto& others = avx2::kQuantizedTable;
  static const QuantizedKernels table = {"avx2 by emulated tiles", others.packed_bytes, others.pack, others.unpack,
                                         avx2::quantized_linear_by_tiles, others.rows, others.round};
  return &table;
}
#else
const penstock::Kernels* penstock::avx2_kernels() { return nullptr; }
const penstock::QuantizedKernels* penstock::quantized_avx2_kernels() { return nullptr; }
const penstock::QuantizedKernels* penstock::quantized_avx2_tiles_kernels() { return nullptr; }
#endif
