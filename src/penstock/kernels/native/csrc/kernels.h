// The kernels that exist once per instruction set, as plain functions on pointers.
//
// Sizes count elements, strides too. float everywhere unless a parameter says otherwise.
#pragma once

#include <cstdint>

namespace penstock {

enum class WeightType : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// out[m][n] = sum over k of x[m][k] * weight[n][k], plus bias[n] if there is one.
//
// weight: from pack_weight. x and out have contiguous rows, x_stride and out_stride apart.
struct LinearArgs {
  const float* x;
  int64_t x_stride;
  const void* weight;
  const float* bias;
  float* out;
  int64_t out_stride;
  int64_t rows, in_features, out_features;
  WeightType weight_type;
  int num_threads;
};

enum class CacheType : int { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };
// The first of each row's largest products, as ArgmaxArgs has it; the product's bias and output are not used.
struct GreedyArgs {
  LinearArgs product;
  int64_t* index;  // [rows]
  bool* failed;    // [rows]
  float* largest;  // [rows], or nullptr
};

// Writes the step's keys and values into the cache, then attends causally.
//
// A block of one KV head holds keys as [dimension][position in block], values as [position in block][dimension], and
// with int8 the scale of each position behind them; blocks lie as [block][kv head].
// Requests are those of a step: request r has tokens query_start[r] .. query_start[r + 1], which are the last ones of
// its seq_lens[r] positions. What a request of more than one token writes, others may read in the same step.
// window: positions seen, the current one included; 0 for all. soft_cap: 0 for none.
// Query and key heads are normalised and rotated first if there are a norm weight and a rotary table.
// phase: only one half of this, where the other half comes, or came, in a call of its own. What only writes reads no
// query and gives no output.
// num_shares: decode context parallel ranks, with runs of `interleave` positions each; this one is `share`. Requests,
// their lengths and windows are of all positions, blocks of those that are here. Queries are the heads of all ranks, equal
// in number, norms those of this rank's. Where there are several, a vector of the output is an average over what is here,
// zeros over nothing, and behind it comes the logarithm, to the base 2, of the sum of what it is weighed by.
enum class AttentionPhase : int { kBoth = 0, kWrite = 1, kAttend = 2 };

struct AttentionArgs {
  const float* query;  // [tokens][heads][head_size]
  int64_t query_stride;
  const float* key;  // [tokens][kv heads][head_size]
  int64_t key_stride;
  const float* value;
  int64_t value_stride;
  void* key_cache;
  void* value_cache;
  int64_t head_stride;  // bytes from one KV head of a block to the next, of which a block has num_kv_heads
  CacheType cache_type;
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_table;
  int64_t block_table_stride;
  int64_t num_requests;
  float* out;  // [tokens][heads][head_size], or [heads][head_size + 1]
  int64_t out_stride;
  int64_t num_heads, num_kv_heads, head_size, block_size, window;
  float scale, soft_cap;
  const float* norm_weight;  // [heads + kv heads][head_size], or nullptr
  float norm_eps;
  const float* rotary_table;  // [positions][cosines, then sines; rotary_half of each], or nullptr
  int64_t rotary_half;
  const int64_t* positions;  // [tokens]
  int64_t num_shares, share, interleave;
  AttentionPhase phase;
  int num_threads;
};

// x / sqrt(mean(x^2) + eps) * weight for the heads of every row; with a residual, x becomes x + residual first, in place.
//
// x and residual: [rows][heads][size], rows x_stride apart. out: the same, contiguous. weight: [size], weight_stride 0,
// or [heads][size]. Plain hidden states are one head.
struct NormArgs {
  float* x;
  int64_t x_stride;
  const float* residual;
  const float* weight;
  int64_t weight_stride;
  float* out;
  int64_t rows, heads, size;
  float eps;
  int num_threads;
};

// kGeluTanh: gelu's approximation by tanh.
enum class Activation : int { kSilu = 0, kGeluTanh = 1 };

// activation(gate) * up, for rows that hold gate, then up: [rows][2 * size] to [rows][size].
struct GateArgs {
  Activation activation;
  const float* x;
  float* out;
  int64_t rows, size;
  int num_threads;
};

// Turns the first 2 * half dimensions of every head in place: (a, b) becomes (a cos - b sin, b cos + a sin).
//
// table: [positions][cosines, then sines; half of each].
struct RotaryArgs {
  float* heads;
  int64_t token_stride, head_stride;
  const int64_t* positions;
  const float* table;
  int64_t num_tokens, num_heads, half;
  int num_threads;
};

// Rows of the packed weight, such as a token's embedding: out[i] = weight[ids[i]].
struct RowsArgs {
  const void* weight;
  const int32_t* ids;
  float* out;
  int64_t num_ids, in_features;
  WeightType weight_type;
  int num_threads;
};

// Rows of a table that is not packed: out[i] = table[ids[i]].
struct LookupArgs {
  const void* table;  // [num_rows][width]
  const int32_t* ids;
  float* out;
  int64_t num_ids, num_rows, width;
  WeightType weight_type;
  int num_threads;
};

// The first of each row's largest values; failed where that is not finite, as what is not a number counts as largest.
struct ArgmaxArgs {
  const float* x;  // [rows][size]
  int64_t* index;  // [rows]
  bool* failed;    // [rows]
  float* largest;  // [rows], or nullptr
  int64_t rows, size;
  int num_threads;
};

// A token of each row, drawn by softmax(x) with a number from (seed, position). failed: a row that has no distribution,
// with what is not a number, plus infinity, or nothing but minus infinity.
struct DrawArgs {
  const float* x;            // [rows][size]
  const int64_t* seeds;      // [slots]
  const int64_t* slots;      // [rows]
  const int64_t* positions;  // [rows]
  int64_t* index;            // [rows]
  bool* failed;              // [rows]
  int64_t rows, size;
  int num_threads;
};

// Minus infinity for the tokens of these rows whose bit is not set: bit i of word w is that of token 32 w + i.
struct AllowArgs {
  float* x;             // rows of `size`
  const int64_t* rows;  // [num_rows], different ones; nullptr for all, one after the other
  const int32_t* words;  // [num_rows][num_words], enough of them for `size`
  int64_t num_rows, size, num_words;
  int num_threads;
};

struct Kernels {
  const char* name;
  // Weights are packed in panels of so many output features: [panel][in_features][panel width].
  int panel_width;
  void (*pack_weight)(const void* weight, int64_t out_features, int64_t in_features, WeightType type, void* packed);
  void (*unpack_weight)(const void* packed, int64_t out_features, int64_t in_features, WeightType type, void* weight);
  // These are false when there is no memory to work in; the output is undefined then.
  bool (*linear)(const LinearArgs&);
  bool (*greedy)(const GreedyArgs&);
  bool (*attention)(const AttentionArgs&);
  void (*rows)(const RowsArgs&);
  void (*lookup)(const LookupArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*gate_and_mul)(const GateArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*argmax)(const ArgmaxArgs&);
  void (*draw)(const DrawArgs&);
  void (*allow_by_bits)(const AllowArgs&);
};

// nullptr where the library was built for another architecture.
const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace penstock
