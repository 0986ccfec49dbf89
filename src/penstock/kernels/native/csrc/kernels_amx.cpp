// AMX: products and attention in bfloat16 arithmetic, and products of many rows with quantised weights, by tiles. Everything else is AVX-512
// with BF16 and VNNI.
#include "every_instruction_set.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")
#endif

#define PENSTOCK_NAME "amx"
#define PENSTOCK_LANES 16
#define PENSTOCK_TILE_ROWS 12

#define PENSTOCK_NAMESPACE penstock::amx
#define PENSTOCK_PANEL_VECTORS 2
#define PENSTOCK_FMA_REGISTER "v"
#define PENSTOCK_PAIR_PRODUCTS
#define PENSTOCK_TILES
#define PENSTOCK_WIDEN_FLOAT16(h) \
  __builtin_ia32_vcvtph2ps512_mask((short __attribute__((vector_size(32))))(h), Vec{}, -1, 4)
// Only products by tiles are taken from here.
#pragma GCC diagnostic ignored "-Wunused-function"
#include "simd.h"
#include "simd_integers.h"
#include "tiles.h"
#include "pairs.h"
#include "elementwise.inl"
#include "tile_registers.h"
#include "tile_products.inl"
#include "linear.inl"
#include "packing.inl"
#include "greedy.inl"
#include "attention_cache.inl"
#include "attention_tiles.inl"
#include "attention_int8.inl"
#include "attention_latent.inl"
#include "attention_plan.inl"
#include "attention_bfloat16.inl"
#include "attention.inl"
#undef PENSTOCK_NAMESPACE

#define PENSTOCK_NAMESPACE penstock::quantized_amx
#define PENSTOCK_QUANTIZED_TILE_ROWS 8
#define PENSTOCK_DOT_QUADS 1
#include "quantized.inl"
#include "quantized_by_tiles.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

// Not compiled for AVX-512: the table is made on every processor.
namespace penstock {
namespace {

bool amx_linear(const LinearArgs& a) {
  const bool are_tiles = a.weight_type == WeightType::kBfloat16Tiles;
  return are_tiles ? amx::linear_of<amx::TilePair>(a) : avx512bf16_kernels()->linear(a);
}

bool amx_greedy(const GreedyArgs& a) {
  return a.product.weight_type == WeightType::kBfloat16Tiles ? amx::greedy_of<amx::TilePair>(a)
                                                             : avx512bf16_kernels()->greedy(a);
}

bool amx_attention(const AttentionArgs& a) {
  const bool has_products = a.phase == AttentionPhase::kBoth || a.phase == AttentionPhase::kAttend;
  if (!has_products || a.cache_type != CacheType::kBfloat16Tiles) return avx512bf16_kernels()->attention(a);
  return amx::attention_over(a, static_cast<amx::Paired<amx::TilePair>*>(nullptr));
}

Kernels amx_table() {
  Kernels table = *avx512bf16_kernels();
  table.name = "amx";
  table.has_tile_products = true;
  table.linear = amx_linear;
  table.greedy = amx_greedy;
  table.attention = amx_attention;
  return table;
}

bool quantized_amx_linear(const QuantizedLinearArgs& a) {
  if (a.rows < tile_choices.fewest_quantized_rows) return quantized_avx512vnni_kernels()->linear(a);
  return quantized_amx::quantized_linear_by_tiles(a);
}

QuantizedKernels quantized_amx_table() {
  QuantizedKernels table = *quantized_avx512vnni_kernels();
  table.name = "amx";
  table.linear = quantized_amx_linear;
  return table;
}

}  // namespace
}  // namespace penstock

const penstock::Kernels* penstock::amx_kernels() {
  static const Kernels table = amx_table();
  return &table;
}

const penstock::QuantizedKernels* penstock::quantized_amx_kernels() {
  static const QuantizedKernels table = quantized_amx_table();
  return &table;
}
#else
const penstock::Kernels* penstock::amx_kernels() { return nullptr; }
const penstock::QuantizedKernels* penstock::quantized_amx_kernels() { return nullptr; }
#endif
