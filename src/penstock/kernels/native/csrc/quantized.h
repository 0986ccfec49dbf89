// Linear layers with int8 or int4 weights, one build per instruction set, as plain functions on pointers.
//
// Activations are quantised to int8 in groups of 32; sums over a group are exact integers.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace penstock {

// A quantised weight: weight[n][k] = value[n][k] * scale[n][k / group_size] + minimum[n][k / group_size].
//
// bits: 8 (any int8 values; from 0 to 127 with minimums), or 4 (values from 0 to 15 with minimums; without, E2M1 numbers
// times two: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives).
// group_size: 16 or a multiple of 32; the last group may be shorter.
// scale_bytes: 4, 2 for scales and minimums that are float16, or 1 for those that are zero or powers of two (normal
// float32 numbers).
struct QuantizedShape {
  int bits;
  int64_t out_features, in_features, group_size;
  int has_minimums, scale_bytes;
};

struct QuantizedPackArgs {
  QuantizedShape shape;
  int8_t* values;   // [out_features][in_features]
  float* scales;    // [out_features][groups]
  float* minimums;  // [out_features][groups]; unused without
  void* packed;     // packed_bytes of the shape, aligned to a cache line
  int num_threads;  // of packing
};

// Quantisation of a float weight to the nearest integers, in groups of 32 with float16 scales, straight into its packed form.
//
// shape: 8 bits without minimums or 4 bits with them, from 32 input features on. rest: packed quantisation errors, of the
// same shape, of a weight of 4 bits; nullptr for none.
struct QuantizedRoundArgs {
  QuantizedShape shape;
  const void* weight;  // [out_features][in_features], rows weight_stride apart
  int64_t weight_stride;
  WeightType weight_type;  // kFloat32, kBfloat16 or kFloat16
  void* packed;
  void* rest;
  int num_threads;
};

// out[m][n] = sum over k of x[m][k] * weight[n][k], plus an optional bias[n].
struct QuantizedLinearArgs {
  QuantizedShape shape;
  const float* x;
  int64_t x_stride;
  const void* weight;
  const float* bias;
  float* out;
  int64_t out_stride;
  int64_t rows;
  int num_threads;
};

// out[i] = weight[ids[i]], plus the optional rest[ids[i]]: of the same shape, the quantised quantisation error of
// weight.
struct QuantizedRowsArgs {
  QuantizedShape shape;
  const void* weight;
  const void* rest;
  const int32_t* ids;
  float* out;
  int64_t num_ids;
  int num_threads;
};

struct QuantizedKernels {
  const char* name;
  int64_t (*packed_bytes)(const QuantizedShape&);
  void (*pack)(const QuantizedPackArgs&);
  void (*unpack)(const QuantizedPackArgs&);
  // False when scratch allocation fails; the output is undefined then.
  bool (*linear)(const QuantizedLinearArgs&);
  bool (*rows)(const QuantizedRowsArgs&);
  // False when a scale or minimum is not finite in float16; the packed weight is undefined then.
  bool (*round)(const QuantizedRoundArgs&);
};

// nullptr where the library was built for another architecture.
const QuantizedKernels* quantized_generic_kernels();
const QuantizedKernels* quantized_avx2_kernels();
const QuantizedKernels* quantized_avx512_kernels();
const QuantizedKernels* quantized_avx512vnni_kernels();
const QuantizedKernels* quantized_amx_kernels();
// AVX2 with the tile registers of AMX emulated: for tests of products by tiles.
const QuantizedKernels* quantized_avx2_tiles_kernels();

}  // namespace penstock
