// Kernels with one build per instruction set, as plain functions on pointers.
//
// Sizes and strides count elements. float everywhere unless a parameter says otherwise.
#pragma once

#include <cstdint>

namespace penstock {

// kBfloat16Pairs: bfloat16 for products in bfloat16 arithmetic, an even number of input features. Rows are rounded to
// bfloat16 too, and products are added in float32, two at a time (pairs.h).
// kBfloat16Tiles: the same, added in the order of AMX's tiles (tile_products.inl).
enum class WeightType : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kBfloat16Pairs = 3, kBfloat16Tiles = 4 };

// Conversion of a weight, [out_features][in_features], to its packed form, or back.
struct PackArgs {
  const void* from;
  void* to;
  int64_t out_features, in_features;
  WeightType weight_type;
  int num_threads;
};

// out[m][n] = sum over k of x[m][k] * weight[n][k], plus an optional bias[n].
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

// kBfloat16Pairs, kBfloat16Tiles: bfloat16 in memory too, with attention in bfloat16 arithmetic, in the order of weights
// of that type; heads of an even size from 16 on.
enum class CacheType : int { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kBfloat16Pairs = 3, kBfloat16Tiles = 4 };
// Argmax of each row's products, as in ArgmaxArgs; the product's bias and output are not used.
struct GreedyArgs {
  LinearArgs product;
  int64_t* index;  // [rows]
  bool* failed;    // [rows]
  float* largest;  // [rows], or nullptr
};

// Writes the step's keys and values into the KV cache, then computes attention, causal unless visible_ends say other.
//
// A block of one KV head holds keys as [dimension][position in block], values as [position in block][dimension], and
// with int8 the scale of each position after them; blocks lie as [block][kv head].
// Request r of the step has tokens query_start[r] .. query_start[r + 1], the last of its seq_lens[r] positions. Blocks
// written by a request of more than one token may be read by other requests in the same step.
// window: sliding window in positions, the current one included; negative for chunked local attention, where a position
// sees those of its chunk of -window positions; 0 for neither. soft_cap: 0 for none.
// visible_ends: end of the positions that each token sees, rising within a request and up to its length, where some
// tokens see later ones; nullptr where each sees those up to its own.
// sinks: scores, without a soft cap, of a position without a value that every softmax of a head has too; alone only.
// slopes: ALiBi, a bias of -slope for each position between a query and a key; nullptr for none. It has one share.
// biases: of each head and distance between a query and a key, for distances up to num_biases - 1, which stands for all
// from there on (Raffel et al. 2019); nullptr for none. It has one share.
// With a norm weight and a rotary table, query and key heads are normalised and rotated first, in this order unless
// norm_is_last.
// phase: kWrite or kAttend for one half alone, when a separate call does the other half. kWrite reads no query and has
// no output.
// num_shares: decode context parallel ranks, with runs of `interleave` positions each; this one is `share`. Requests,
// lengths and windows count all positions, blocks those of this rank. Queries are the heads of all ranks, equal in
// number; norm weights are this rank's. With several ranks, an output vector is the weighted mean over this rank's
// positions (zeros without any), followed by the base-2 logarithm of the sum of its weights (log-sum-exp).
// latent_size: latent attention, with one KV head whose values are the last latent_size elements of its keys; 0 for
// none. Blocks then hold keys alone, as [position in block][dimension]; value_cache is where their values begin. It has
// no int8 and one share.
// kWholeTexts: attention in both directions over the tokens of each request, without a cache, whose fields, lengths and
// block tables are not read; `window` is then the number of visible positions on either side, 0 for all.
enum class AttentionPhase : int { kBoth = 0, kWrite = 1, kAttend = 2, kWholeTexts = 3 };

struct AttentionArgs {
  const float* query;  // [tokens][heads][head_size]
  int64_t query_stride;
  const float* key;  // [tokens][kv heads][head_size]
  int64_t key_stride;
  const float* value;
  int64_t value_stride;
  void* key_cache;
  void* value_cache;
  int64_t head_stride;  // bytes between two of a block's num_kv_heads KV heads
  CacheType cache_type;
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_table;
  int64_t block_table_stride;
  int64_t num_requests;
  float* out;  // [tokens][heads][head_size], or [heads][head_size + 1]
  int64_t out_stride;
  int64_t num_heads, num_kv_heads, head_size, block_size, window, latent_size;
  float scale, soft_cap;
  const float* sinks;        // [heads], or nullptr
  const float* slopes;       // [heads], or nullptr
  const float* biases;       // [heads][num_biases], or nullptr
  int64_t num_biases;
  const float* norm_weight;  // [heads + kv heads][head_size], or nullptr
  float norm_eps;
  int norm_is_last;
  const float* rotary_table;  // [positions][cosines, then sines; rotary_half of each], or nullptr
  int64_t rotary_half;
  const int64_t* positions;     // [tokens]
  const int32_t* visible_ends;  // [tokens], or nullptr
  int64_t num_shares, share, interleave;
  AttentionPhase phase;
  int num_threads;
};

// RMS norm: x / sqrt(mean(x^2) + eps) * weight for the heads of every row; with a residual, x becomes x + residual
// first, in place.
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

// Layer norm: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias of every row; with a residual, x becomes x + residual
// first, in place.
//
// x, residual: [rows][size], x with x_stride. out: contiguous. weight, bias: [size]; a bias of nullptr is zero.
struct LayerNormArgs {
  float* x;
  int64_t x_stride;
  const float* residual;
  const float* weight;
  const float* bias;
  float* out;
  int64_t rows, size;
  float eps;
  int num_threads;
};

// kGeluTanh: tanh approximation of GELU. kGelu: the exact one.
// kClampedSwiglu: of gates only.
enum class Activation : int { kSilu = 0, kGeluTanh = 1, kGelu = 2, kRelu = 3, kClampedSwiglu = 4, kSquaredRelu = 5 };

// activation(x): [rows][size].
struct ActivationArgs {
  Activation activation;
  const float* x;
  float* out;
  int64_t rows, size;
  int num_threads;
};

// activation(gate) * up, for rows that hold gate, then up: [rows][2 * size] to [rows][size].
//
// kClampedSwiglu: gate * sigmoid(alpha * gate) * (up + 1), of gates up to `limit` and ups of at most that size.
struct GateArgs {
  Activation activation;
  const float* x;
  float* out;
  int64_t rows, size;
  float alpha, limit;
  int num_threads;
};

// RoPE of the first 2 * half dimensions of every head, in place: (a, b) becomes (a cos - b sin, b cos + a sin).
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

// Rows of the packed weight, such as token embeddings: out[i] = weight[ids[i]].
struct RowsArgs {
  const void* weight;
  const int32_t* ids;
  float* out;
  int64_t num_ids, in_features;
  WeightType weight_type;
  int num_threads;
};

// Rows of an unpacked table: out[i] = table[ids[i]].
struct LookupArgs {
  const void* table;  // [num_rows][width]
  const int32_t* ids;
  float* out;
  int64_t num_ids, num_rows, width;
  WeightType weight_type;
  int num_threads;
};

// Argmax of each row, the first on ties; NaN counts as largest. failed: the largest value is not finite.
struct ArgmaxArgs {
  const float* x;  // [rows][size]
  int64_t* index;  // [rows]
  bool* failed;    // [rows]
  float* largest;  // [rows], or nullptr
  int64_t rows, size;
  int num_threads;
};

// A token of each row sampled from softmax(x), with random bits from (seed, position). failed: a row without a
// distribution, because of a NaN, plus infinity, or nothing but minus infinity.
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

// Sets logits to minus infinity where a token's bit is not set: bit i of word w is token 32 w + i.
struct AllowArgs {
  float* x;             // rows of `size`
  const int64_t* rows;  // [num_rows], distinct; nullptr for rows 0 .. num_rows
  const int32_t* words;  // [num_rows][num_words], at least `size` bits
  int64_t num_rows, size, num_words;
  int num_threads;
};

// Output features of a panel of an adapter's matrix, for every instruction set.
constexpr int kAdapterPanel = 16;

// out[m] += scaling * B (A x[m]) for the adapter in slot slots[m]; other numbers than 0 to num_slots - 1 stand for none.
//
// A layer's outputs are one or several pieces, each with a low-rank product of its own. Matrices lie in panels of
// kAdapterPanel outputs, [panel][inner dimension][kAdapterPanel]: A of [rank][in_features], B of [outputs][rank].
struct AdapterArgs {
  const float* x;  // with a: rows of in_features; without: of A x, for all pieces
  int64_t x_stride;
  float* out;
  int64_t out_stride;
  const int32_t* slots;   // [rows]
  const void* a;          // [num_slots][num_pieces][max_rank * in_features], or nullptr
  const void* b;          // [num_slots][b_size]
  const int64_t* ranks;   // [num_slots][num_pieces]; 0 for none
  const float* scalings;  // [num_slots][num_pieces]
  const int64_t* pieces;  // [num_pieces]: first output, number of outputs, offset within b_size
  int64_t num_slots, num_pieces, in_features;
  int64_t max_rank;  // a multiple of kAdapterPanel
  int64_t b_size, rows;
  WeightType weight_type;
  int num_threads;
};

// out[m][h][n] = sum over k of x[m][h][k] * weight[h][n][k], as in LinearArgs for each head.
//
// weight: each head's from pack_weight, one behind the other, not in pairs.
struct HeadProductsArgs {
  const float* x;
  int64_t x_stride, x_head_stride;
  const void* weight;
  const float* bias;  // [heads][out_features], or nullptr
  float* out;
  int64_t out_stride, out_head_stride, out_offset;
  int64_t rows, heads, in_features, out_features;
  WeightType weight_type;
  int num_threads;
};

// Query heads and the key of latent attention: heads of the rotary part, then the product of the rest with the head's
// weight; last the key, of its rotary part, then the normalised latent.
//
// product: x has heads of in_features and rotary_size, out heads of rotary_size and out_features. latents: rows with
// out_features and rotary_size from latent_offset on. is_interleaved: rotated pairs are adjacent in x and latents; in
// the output they are in either half.
struct AbsorbArgs {
  HeadProductsArgs product;
  const float* latents;
  int64_t latents_stride, latent_offset, rotary_size;
  int is_interleaved;
  const float* norm_weight;
  float norm_eps;
};

// States of a step's requests, a part of a page each (kernels/recurrent_state.py).
//
// A row of the block table has num_own_blocks blocks of the request's own, the state after position p in block
// p % num_own_blocks, then one block per block_size positions for snapshots, 0 where there is none.
struct StatePages {
  char* pages;
  int64_t page_stride;  // bytes
  int64_t num_own_blocks, block_size;
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_table;
  int64_t block_table_stride, num_requests;
};

enum class StateType : int { kFloat32 = 0, kBfloat16 = 1 };
enum class GateActivation : int { kNone = 0, kSilu = 1, kSigmoid = 2 };

// Causal depthwise convolution of the columns of x from `offset` on, as `convolve` of kernels/recurrence.py.
//
// The state is the last taps - 1 inputs, [taps - 1][channels]. gate_before, gate_after: columns of factors on inputs
// and outputs; negative for none. weight: [taps][channels].
struct ConvolutionArgs {
  StatePages states;
  StateType state_type;
  const float* x;
  int64_t x_stride;
  float* out;
  int64_t out_stride;
  int64_t offset, gate_before, gate_after, channels, taps;
  GateActivation activation;
  const float* weight;
  const float* bias;  // [channels], or nullptr
  int num_threads;
};

constexpr int64_t kMostTaps = 16;

// Steps of a recurrence: a number per head, per head and key channel, or per head and value channel.
enum class StepSize : int { kHead = 0, kKey = 1, kValue = 2 };
enum class StepActivation : int { kSoftplus = 0, kSigmoid = 1 };

// Linear recurrence, as `scan` of kernels/recurrence.py; the state is [heads][key_size][value_size].
//
// steps, betas: negative for none. keys, queries: negative for ones, with steps by value. keeps_variance: with steps by
// value. decays_by_element: decay_log is [heads][key_size][value_size] instead of [heads]. skips_by_value: skip is
// [heads][value_size] instead of [heads].
struct RecurrenceArgs {
  StatePages states;
  StateType state_type;
  const float* mixed;
  int64_t mixed_stride;
  const float* gates;
  int64_t gates_stride;
  float* out;  // rows of heads * value_size
  int64_t out_stride;
  int64_t num_heads, num_groups, key_size, value_size;
  int64_t values, keys, queries, steps, betas;
  StepSize step_size;
  StepActivation step_activation;
  int scales_values, keeps_variance, has_unit_keys, decays_by_element, skips_by_value;
  float step_scale, min_step, max_step, beta_scale, query_scale;
  const float* decay_log;
  const float* step_bias;  // as many as steps, or nullptr
  const float* skip;       // or nullptr
  int num_threads;
};

// RMS norm by groups of x, with a gate from the columns of `gate` from `offset` on, as `gated_norm` of
// kernels/recurrence.py.
//
// weight: [size], weight_stride is group_size, or one for all groups, [group_size], and 0; nullptr for the gate alone.
struct GatedNormArgs {
  const float* x;  // rows of `size`
  int64_t x_stride;
  const float* gate;
  int64_t gate_stride;
  float* out;  // rows of `size`, contiguous
  int64_t rows, size, offset, group_size;
  const float* weight;
  int64_t weight_stride;
  float eps, gate_scale;
  int gates_first;
  GateActivation activation;
  int num_threads;
};

struct Kernels {
  const char* name;
  // Whether the CPU has an instruction for products of bfloat16 pairs.
  bool has_pair_products;
  // Whether it has AMX's products of tiles.
  bool has_tile_products;
  // Weights are packed in panels of so many output features, [panel][in_features][panel width]; those for tiles in
  // panels of 32, with in_features padded to a multiple of 32.
  int panel_width;
  void (*pack_weight)(const PackArgs&);
  void (*unpack_weight)(const PackArgs&);
  // These return false when scratch allocation fails; the output is undefined then.
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
  void (*layer_norm)(const LayerNormArgs&);
  void (*activate)(const ActivationArgs&);
  bool (*adapters)(const AdapterArgs&);  // false as above
  bool (*head_products)(const HeadProductsArgs&);  // false as above
  bool (*absorb)(const AbsorbArgs&);               // false as above
  void (*convolve)(const ConvolutionArgs&);
  bool (*recur)(const RecurrenceArgs&);  // false as above
  void (*gated_norm)(const GatedNormArgs&);
};

// nullptr where the library was built for another architecture.
const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512bf16_kernels();
const Kernels* amx_kernels();

}  // namespace penstock
