#include "operations.h"

#include <iterator>
#include <type_traits>
#include <utility>

#include "attention_of_ranks.h"
#include "experts.h"
#include "program.h"
#include "recurrence.h"
#include "scratch.h"

namespace penstock {
namespace {

// Kernel argument structures also have per-call fields, which a call fills in; the other fields are constants.

struct LookupArguments {
  TokenShare share;
  LookupArgs table;
};

struct RowsArguments {
  TokenShare share;
  int64_t num_rows;
  RowsArgs table;
};

struct QuantizedRowsArguments {
  const QuantizedKernels* kernels;
  TokenShare share;
  QuantizedRowsArgs table;
};

struct QuantizedLinearArguments {
  const QuantizedKernels* kernels;
  QuantizedLinearArgs product;
};

struct ColumnsArguments {
  int64_t offset, width;
};

struct ScaleArguments {
  float factor;
};

struct RanksArguments {
  Ranks ranks;
};

struct MergeArguments {
  Ranks ranks;
  int64_t first_index;  // of this rank's tokens in the vocabulary
};

template <class Args>
Args of_rows(Args a, const Call& call) {
  a.x = call.x.at;
  a.rows = call.num_rows;
  a.num_threads = call.num_threads;
  return a;
}

Result with_memory(bool had_memory) { return {had_memory, 0}; }

// A norm of rows, after the residual is added. kernel: of the table of kernels.
template <typename Args>
Result norm(const Operation& operation, const Call& call, void (*Kernels::*kernel)(const Args&)) {
  Args a = of_rows(operation.get<Args>(), call);
  a.x_stride = call.x.stride;
  a.residual = call.second.at;
  a.out = call.out.at;
  (call.kernels->*kernel)(a);
  return kDone;
}

Result rms_norm(const Operation& operation, const Call& call) { return norm(operation, call, &Kernels::rms_norm); }

Result layer_norm(const Operation& operation, const Call& call) { return norm(operation, call, &Kernels::layer_norm); }

Result activate(const Operation& operation, const Call& call) {
  ActivationArgs a = of_rows(operation.get<ActivationArgs>(), call);
  a.out = call.out.at;
  call.kernels->activate(a);
  return kDone;
}

Result gate_and_mul(const Operation& operation, const Call& call) {
  GateArgs a = of_rows(operation.get<GateArgs>(), call);
  a.out = call.out.at;
  call.kernels->gate_and_mul(a);
  return kDone;
}

template <class Args>
Args of_product(const Args& args, const Call& call) {
  Args a = of_rows(args, call);
  a.x_stride = call.x.stride;
  a.out = call.out.at;
  a.out_stride = call.out.stride;
  return a;
}

Result linear(const Operation& operation, const Call& call) {
  return with_memory(call.kernels->linear(of_product(operation.get<LinearArgs>(), call)));
}

Result quantized_linear(const Operation& operation, const Call& call) {
  const auto arguments = operation.get<QuantizedLinearArguments>();
  return with_memory(arguments.kernels->linear(of_product(arguments.product, call)));
}

// Looks up the ids in this rank's shard, and zeroes the rows of other ranks' ids. look_up: takes num_rows ids.
template <class LookUp>
Result look_up_share(const TokenShare& share, const Call& call, LookUp look_up) {
  const auto* all = static_cast<const int32_t*>(call.input);
  if (share.size == 0) return look_up(all);
  static thread_local Scratch scratch;
  auto* ids = reinterpret_cast<int32_t*>(scratch.get(static_cast<size_t>(call.num_rows)));
  if (ids == nullptr) return with_memory(false);
  const auto is_here = [&](int64_t id) { return id >= share.start && id < share.start + share.size; };
  for (int64_t i = 0; i < call.num_rows; ++i)
    ids[i] = is_here(all[i]) ? static_cast<int32_t>(all[i] - share.start) : 0;
  const Result result = look_up(ids);
  float* row = call.out.at;
  for (int64_t i = 0; i < call.num_rows; ++i, row += call.out.stride)
    if (!is_here(all[i])) std::memset(row, 0, call.out.stride * sizeof(float));
  return result;
}

template <class Args>
Args of_ids(Args a, const Call& call, const int32_t* ids) {
  a.ids = ids;
  a.out = call.out.at;
  a.num_ids = call.num_rows;
  a.num_threads = call.num_threads;
  return a;
}

Result lookup(const Operation& operation, const Call& call) {
  const auto arguments = operation.get<LookupArguments>();
  return look_up_share(arguments.share, call, [&](const int32_t* ids) {
    call.kernels->lookup(of_ids(arguments.table, call, ids));
    return kDone;
  });
}

Result rows(const Operation& operation, const Call& call) {
  const auto arguments = operation.get<RowsArguments>();
  return look_up_share(arguments.share, call, [&](const int32_t* ids) {
    call.kernels->rows(of_ids(arguments.table, call, ids));
    return kDone;
  });
}

Result quantized_rows(const Operation& operation, const Call& call) {
  const auto arguments = operation.get<QuantizedRowsArguments>();
  return look_up_share(arguments.share, call, [&](const int32_t* ids) {
    return with_memory(arguments.kernels->rows(of_ids(arguments.table, call, ids)));
  });
}

Result scale(const Operation& operation, const Call& call) {
  const float factor = operation.get<ScaleArguments>().factor;
  for (int64_t i = 0; i < call.num_rows * call.x.stride; ++i) call.x.at[i] *= factor;
  return kDone;
}

Result sum(const Operation&, const Call& call) {
  const int64_t size = call.num_rows * call.x.stride;
  const float *x = call.x.at, *second = call.second.at;
  if (second == nullptr) {
    std::memcpy(call.out.at, x, size * sizeof(float));
    return kDone;
  }
  for (int64_t i = 0; i < size; ++i) call.out.at[i] = x[i] + second[i];
  return kDone;
}

Result columns(const Operation& operation, const Call& call) {
  const auto arguments = operation.get<ColumnsArguments>();
  for (int64_t i = 0; i < call.num_rows; ++i)
    std::memcpy(call.out.at + i * call.out.stride, call.x.at + i * call.x.stride + arguments.offset,
                arguments.width * sizeof(float));
  return kDone;
}

Result concatenate(const Operation&, const Call& call) {
  float* out = call.out.at;
  for (int64_t i = 0; i < call.num_rows; ++i, out += call.x.stride + call.second.stride) {
    std::memcpy(out, call.x.at + i * call.x.stride, call.x.stride * sizeof(float));
    std::memcpy(out + call.x.stride, call.second.at + i * call.second.stride, call.second.stride * sizeof(float));
  }
  return kDone;
}

Result head_products(const Operation& operation, const Call& call) {
  HeadProductsArgs a = of_product(operation.get<HeadProductsArgs>(), call);
  a.x_head_stride = a.in_features;
  a.out_head_stride = a.out_features;
  return with_memory(call.kernels->head_products(a));
}

Result absorb(const Operation& operation, const Call& call) {
  AbsorbArgs a = operation.get<AbsorbArgs>();
  a.product = of_product(a.product, call);
  a.latents = call.second.at;
  a.latents_stride = call.second.stride;
  return with_memory(call.kernels->absorb(a));
}

Result greedy(const Operation& operation, const Call& call) {
  GreedyArgs a{};
  a.product = of_rows(operation.get<LinearArgs>(), call);
  a.product.x_stride = call.x.stride;
  a.index = call.index;
  a.failed = call.failed;
  a.largest = call.out.at;
  return with_memory(call.kernels->greedy(a));
}

Result adapters(const Operation& operation, const Call& call) {
  AdapterArgs a = of_product(operation.get<AdapterArgs>(), call);
  a.slots = static_cast<const int32_t*>(call.input);
  return with_memory(call.kernels->adapters(a));
}

Result argmax(const Operation&, const Call& call) {
  ArgmaxArgs a = of_rows(ArgmaxArgs{}, call);
  a.size = call.x.stride;
  a.index = call.index;
  a.failed = call.failed;
  a.largest = call.out.at;
  call.kernels->argmax(a);
  return kDone;
}

Result all_reduce(const Operation& operation, const Call& call) {
  const int64_t num_bytes = call.num_rows * call.x.stride * static_cast<int64_t>(sizeof(float));
  return {true, run_collective({operation.get<RanksArguments>().ranks, static_cast<int64_t>(CollectiveKind::kSum), call.x.at, num_bytes, 1, call.x.at})};
}

// A rank's argmax of a row.
struct Choice {
  float largest;
  int32_t index;
};

// Whether this choice is larger than that of an earlier rank; NaN counts as largest.
bool is_larger(const Choice& choice, const Choice& before) {
  const bool was_number = before.largest == before.largest;
  return was_number && (choice.largest > before.largest || choice.largest != choice.largest);
}

// Argmax across ranks; on ties the first rank wins, whose indices are lower.
Result merge_choices(const Operation& operation, const Call& call) {
  static thread_local Scratch scratch;
  static_assert(sizeof(Choice) == 2 * sizeof(float), "choices are counted in floats");
  const auto arguments = operation.get<MergeArguments>();
  const int64_t size = arguments.ranks.size, num_rows = call.num_rows;
  auto* own = reinterpret_cast<Choice*>(scratch.get(static_cast<size_t>(2 * (size + 1) * num_rows)));
  if (own == nullptr) return with_memory(false);
  Choice* all = own + num_rows;
  for (int64_t i = 0; i < num_rows; ++i)
    own[i] = {call.x.at[i], static_cast<int32_t>(call.index[i] + arguments.first_index)};
  const int64_t num_bytes = num_rows * static_cast<int64_t>(sizeof(Choice));
  const int64_t status = run_collective({arguments.ranks, static_cast<int64_t>(CollectiveKind::kGather), own, num_bytes, 1, all});
  if (status != 0) return {true, status};
  for (int64_t i = 0; i < num_rows; ++i) {
    Choice best = all[i];
    for (int64_t rank = 1; rank < size; ++rank)
      if (is_larger(all[rank * num_rows + i], best)) best = all[rank * num_rows + i];
    call.index[i] = best.index;
    call.failed[i] = !__builtin_isfinite(best.largest);
  }
  return kDone;
}

// Moves the rows of last tokens to the front, in place. They only move forward; rows before them may be overwritten
// already.
Result keep_last(const Operation&, const Call& call) {
  const LastTokens& last = call.step->last;
  if (last.count == 0) return kDone;
  for (int64_t i = 0; i < call.num_rows; ++i) {
    const int64_t from = last.rows[call.first_row + i] - call.first_row;
    std::memmove(call.x.at + i * call.x.stride, call.x.at + from * call.x.stride, call.x.stride * sizeof(float));
  }
  return kDone;
}

// Keeps the rows of last tokens only, where the step asks for these alone.
Result narrow(const Operation& operation, const Call& call) {
  Call of_last = call;
  of_last.num_rows = call.step->last.count;
  return keep_last(operation, of_last);
}

Result attend(const AttentionArguments& arguments, const Kernels& kernels, const AttentionArgs& args) {
  const AttentionOutcome outcome = attention_of_ranks(kernels, args, arguments.ranks);
  return {outcome.had_memory, outcome.collective_status};
}

// Arguments of attention over the output of the QKV projection.
AttentionArgs of_projection(const AttentionArguments& arguments, const Call& call) {
  const StepRequests& requests = call.step->groups[arguments.group];
  AttentionArgs a = arguments.attention;
  a.query = call.x.at;
  a.key = a.query + a.num_heads * a.head_size;
  a.value = a.key + a.num_kv_heads * a.head_size;
  a.query_stride = a.key_stride = a.value_stride = call.x.stride;
  a.out = call.out.at;
  a.out_stride = call.out.stride;
  a.query_start = requests.query_start;
  a.seq_lens = requests.seq_lens;
  a.block_table = requests.block_table;
  a.block_table_stride = requests.block_table_stride;
  a.num_requests = requests.num_requests;
  a.positions = static_cast<const int64_t*>(call.input);
  a.visible_ends = call.step->visible_ends;
  a.phase = AttentionPhase::kBoth;
  a.num_threads = call.num_threads;
  return a;
}

Result attend_without_padding(const AttentionArguments& arguments, const Call& call, const AttentionArgs& a) {
  const ProgramStep& step = *call.step;
  std::memset(a.out + step.num_tokens * a.out_stride, 0,
              (step.num_rows - step.num_tokens) * a.out_stride * sizeof(float));
  return step.num_tokens == 0 ? kDone : attend(arguments, *call.kernels, a);
}

// Output rows of padding become zero. Where the step asks for last tokens alone, the keys and values of all tokens are
// written, but only the last tokens' queries attend, and their rows come first from then on.
Result attention(const Operation& operation, const Call& call) {
  const auto arguments = operation.get<AttentionArguments>();
  const ProgramStep& step = *call.step;
  AttentionArgs a = of_projection(arguments, call);
  if (arguments.is_last && step.last.count > 0) {
    a.phase = AttentionPhase::kWrite;
    const Result written = attend(arguments, *call.kernels, a);
    if (!written.is_good()) return written;
    narrow(operation, call);
    a.query_start = step.last.query_start;
    a.seq_lens = step.last.seq_lens;
    a.positions = step.last.positions;
    a.visible_ends = nullptr;
    a.phase = AttentionPhase::kAttend;
    return attend(arguments, *call.kernels, a);
  }
  return attend_without_padding(arguments, call, a);
}

// Attention of queries alone to what the cache holds. Output rows of padding become zero.
Result cross_attention(const Operation& operation, const Call& call) {
  const auto arguments = operation.get<AttentionArguments>();
  AttentionArgs a = of_projection(arguments, call);
  a.key = a.value = nullptr;
  a.visible_ends = nullptr;
  a.phase = AttentionPhase::kAttend;
  return attend_without_padding(arguments, call, a);
}

// Attention in both directions over whole texts, the requests of the step. Output rows of padding become zero.
Result encoder_attention(const Operation& operation, const Call& call) {
  const auto arguments = operation.get<AttentionArguments>();
  AttentionArgs a = of_projection(arguments, call);
  a.phase = AttentionPhase::kWholeTexts;
  return attend_without_padding(arguments, call, a);
}

template <class Member>
constexpr FieldType type_of() {
  if constexpr (std::is_same_v<Member, const float*>) return FieldType::kFloats;
  else if constexpr (std::is_same_v<Member, const QuantizedKernels*>) return FieldType::kQuantizedKernels;
  else if constexpr (std::is_pointer_v<Member>) return FieldType::kTensor;
  else if constexpr (std::is_same_v<Member, float>) return FieldType::kFloat;
  else if constexpr (sizeof(Member) == 8) return FieldType::kInt64;
  else return FieldType::kInt32;
}

#define MEMBER(Arguments, member) decltype(std::declval<Arguments>().member)
#define FIELD(Arguments, member) \
  Field { #member, type_of<std::remove_reference_t<MEMBER(Arguments, member)>>(), offsetof(Arguments, member), 4 }
// A tensor aligned to a cache line, as packed weights are.
#define PACKED(Arguments, member) \
  Field { #member, FieldType::kPacked, offsetof(Arguments, member), 64 }
#define RANKS(Arguments)                                                                                    \
  FIELD(Arguments, ranks.memory), FIELD(Arguments, ranks.rank), FIELD(Arguments, ranks.size),               \
      FIELD(Arguments, ranks.slot_bytes), FIELD(Arguments, ranks.timeout_us), FIELD(Arguments, ranks.spin_us)
#define SHARE(Arguments) FIELD(Arguments, share.start), FIELD(Arguments, share.size), FIELD(Arguments, share.whole)
#define SHAPE(Arguments, shape)                                                                 \
  FIELD(Arguments, shape.bits), FIELD(Arguments, shape.out_features), FIELD(Arguments, shape.in_features), \
      FIELD(Arguments, shape.group_size), FIELD(Arguments, shape.has_minimums), FIELD(Arguments, shape.scale_bytes)

#define STATES(Arguments, member)                                                              \
  FIELD(Arguments, group), FIELD(Arguments, member.states.pages), FIELD(Arguments, member.states.page_stride), \
      FIELD(Arguments, member.states.num_own_blocks), FIELD(Arguments, member.states.block_size),              \
      FIELD(Arguments, member.state_type)

#define SHARED_GROUP                                                                  \
  FIELD(SharedGroupArguments, size), FIELD(SharedGroupArguments, group),              \
      FIELD(SharedGroupArguments, num_groups), FIELD(SharedGroupArguments, group_size)

#define ATTENTION_FIELDS                                                                                            \
  FIELD(AttentionArguments, group), FIELD(AttentionArguments, is_last),                                             \
      FIELD(AttentionArguments, attention.key_cache), FIELD(AttentionArguments, attention.value_cache),             \
      FIELD(AttentionArguments, attention.head_stride), FIELD(AttentionArguments, attention.cache_type),            \
      FIELD(AttentionArguments, attention.num_heads), FIELD(AttentionArguments, attention.num_kv_heads),            \
      FIELD(AttentionArguments, attention.head_size), FIELD(AttentionArguments, attention.block_size),              \
      FIELD(AttentionArguments, attention.window), FIELD(AttentionArguments, attention.latent_size),                \
      FIELD(AttentionArguments, attention.scale), FIELD(AttentionArguments, attention.soft_cap),                    \
      FIELD(AttentionArguments, attention.sinks), FIELD(AttentionArguments, attention.slopes),                      \
      FIELD(AttentionArguments, attention.norm_weight), FIELD(AttentionArguments, attention.norm_eps),              \
      FIELD(AttentionArguments, attention.norm_is_last), FIELD(AttentionArguments, attention.rotary_table),         \
      FIELD(AttentionArguments, attention.rotary_half), RANKS(AttentionArguments),                                  \
      FIELD(AttentionArguments, attention.interleave)

constexpr Scope kRows = Scope::kRows, kStep = Scope::kStep;
constexpr Use kNone = Use::kNone, kRead = Use::kRead, kReadAny = Use::kReadAny, kChange = Use::kChange,
              kOverwrite = Use::kOverwrite, kMake = Use::kMake, kMakeAny = Use::kMakeAny;
constexpr InputType kNoInput = InputType::kNone, kInt32 = InputType::kInt32, kInt64 = InputType::kInt64;

template <class Arguments>
int64_t num_known_rows(const Operation& operation) {
  const auto arguments = operation.get<Arguments>();
  if (arguments.share.size > 0) return arguments.share.whole;
  if constexpr (std::is_same_v<Arguments, LookupArguments>) return arguments.table.num_rows;
  else if constexpr (std::is_same_v<Arguments, RowsArguments>) return arguments.num_rows;
  else return arguments.table.shape.out_features;
}

// Name, scope, uses of x, second operand and result, step input, whether it chooses tokens, kernel, arguments.
const OperationType kTypes[] = {
    {"rms_norm", kRows, kChange, kReadAny, kMake, kNoInput, false, rms_norm,
     {FIELD(NormArgs, weight), FIELD(NormArgs, heads), FIELD(NormArgs, weight_stride), FIELD(NormArgs, size),
      FIELD(NormArgs, eps)},
     nullptr},
    {"gate_and_mul", kRows, kRead, kNone, kMake, kNoInput, false, gate_and_mul,
     {FIELD(GateArgs, activation), FIELD(GateArgs, size), FIELD(GateArgs, alpha), FIELD(GateArgs, limit)},
     nullptr},
    {"linear", kRows, kRead, kNone, kMake, kNoInput, false, linear,
     {PACKED(LinearArgs, weight), FIELD(LinearArgs, bias), FIELD(LinearArgs, in_features),
      FIELD(LinearArgs, out_features), FIELD(LinearArgs, weight_type)},
     nullptr},
    {"layer_norm", kRows, kChange, kReadAny, kMake, kNoInput, false, layer_norm,
     {FIELD(LayerNormArgs, weight), FIELD(LayerNormArgs, bias), FIELD(LayerNormArgs, size), FIELD(LayerNormArgs, eps)},
     nullptr},
    {"activate", kRows, kRead, kNone, kMake, kNoInput, false, activate,
     {FIELD(ActivationArgs, activation), FIELD(ActivationArgs, size)},
     nullptr},
    {"quantized_linear", kRows, kRead, kNone, kMake, kNoInput, false, quantized_linear,
     {FIELD(QuantizedLinearArguments, kernels), PACKED(QuantizedLinearArguments, product.weight),
      FIELD(QuantizedLinearArguments, product.bias), SHAPE(QuantizedLinearArguments, product.shape)},
     nullptr},
    {"attention", kStep, kOverwrite, kNone, kMake, kInt64, false, attention, {ATTENTION_FIELDS}, nullptr},
    {"encoder_attention", kStep, kOverwrite, kNone, kMake, kInt64, false, encoder_attention, {ATTENTION_FIELDS}, nullptr},
    {"cross_attention", kStep, kRead, kNone, kMake, kNoInput, false, cross_attention, {ATTENTION_FIELDS}, nullptr},
    {"biased_attention", kStep, kOverwrite, kNone, kMake, kInt64, false, attention,
     {ATTENTION_FIELDS, FIELD(AttentionArguments, attention.biases), FIELD(AttentionArguments, attention.num_biases)},
     nullptr},
    {"lookup", kRows, kNone, kNone, kMake, kInt32, false, lookup,
     {SHARE(LookupArguments), FIELD(LookupArguments, table.table), FIELD(LookupArguments, table.num_rows),
      FIELD(LookupArguments, table.width), FIELD(LookupArguments, table.weight_type)},
     num_known_rows<LookupArguments>},
    {"rows", kRows, kNone, kNone, kMake, kInt32, false, rows,
     {SHARE(RowsArguments), PACKED(RowsArguments, table.weight), FIELD(RowsArguments, num_rows),
      FIELD(RowsArguments, table.in_features), FIELD(RowsArguments, table.weight_type)},
     num_known_rows<RowsArguments>},
    {"quantized_rows", kRows, kNone, kNone, kMake, kInt32, false, quantized_rows,
     {SHARE(QuantizedRowsArguments), FIELD(QuantizedRowsArguments, kernels),
      PACKED(QuantizedRowsArguments, table.weight), PACKED(QuantizedRowsArguments, table.rest),
      SHAPE(QuantizedRowsArguments, table.shape)},
     num_known_rows<QuantizedRowsArguments>},
    {"scale", kRows, kChange, kNone, kNone, kNoInput, false, scale, {FIELD(ScaleArguments, factor)}, nullptr},
    {"sum", kRows, kRead, kReadAny, kMake, kNoInput, false, sum, {}, nullptr},
    {"columns", kRows, kRead, kNone, kMake, kNoInput, false, columns,
     {FIELD(ColumnsArguments, offset), FIELD(ColumnsArguments, width)},
     nullptr},
    {"concatenate", kRows, kRead, kRead, kMake, kNoInput, false, concatenate, {}, nullptr},
    {"greedy", kRows, kRead, kNone, kMakeAny, kNoInput, true, greedy,
     {PACKED(LinearArgs, weight), FIELD(LinearArgs, in_features), FIELD(LinearArgs, out_features),
      FIELD(LinearArgs, weight_type)},
     nullptr},
    {"adapters", kRows, kRead, kNone, kChange, kInt32, false, adapters,
     {FIELD(AdapterArgs, a), FIELD(AdapterArgs, b), FIELD(AdapterArgs, ranks), FIELD(AdapterArgs, scalings),
      FIELD(AdapterArgs, pieces), FIELD(AdapterArgs, num_slots), FIELD(AdapterArgs, num_pieces),
      FIELD(AdapterArgs, in_features), FIELD(AdapterArgs, max_rank), FIELD(AdapterArgs, b_size),
      FIELD(AdapterArgs, weight_type)},
     nullptr},
    {"head_products", kRows, kRead, kNone, kMake, kNoInput, false, head_products,
     {PACKED(HeadProductsArgs, weight), FIELD(HeadProductsArgs, bias), FIELD(HeadProductsArgs, weight_type),
      FIELD(HeadProductsArgs, heads), FIELD(HeadProductsArgs, in_features), FIELD(HeadProductsArgs, out_features)},
     nullptr},
    {"absorb", kRows, kRead, kRead, kMake, kNoInput, false, absorb,
     {PACKED(AbsorbArgs, product.weight), FIELD(AbsorbArgs, product.weight_type), FIELD(AbsorbArgs, product.heads),
      FIELD(AbsorbArgs, product.in_features), FIELD(AbsorbArgs, product.out_features), FIELD(AbsorbArgs, rotary_size),
      FIELD(AbsorbArgs, is_interleaved), FIELD(AbsorbArgs, latent_offset), FIELD(AbsorbArgs, norm_weight),
      FIELD(AbsorbArgs, norm_eps)},
     nullptr},
    {"argmax", kRows, kRead, kNone, kMakeAny, kNoInput, true, argmax, {}, nullptr},
    {"all_reduce", kRows, kChange, kNone, kNone, kNoInput, false, all_reduce, {RANKS(RanksArguments)},
     nullptr},
    {"merge_choices", kRows, kRead, kNone, kNone, kNoInput, true, merge_choices,
     {RANKS(MergeArguments), FIELD(MergeArguments, first_index)},
     nullptr},
    {"experts", kStep, kRead, kRead, kMake, kNoInput, false, experts,
     {FIELD(ExpertsArguments, rule.bias), FIELD(ExpertsArguments, rule.num_experts),
      FIELD(ExpertsArguments, rule.top_k), FIELD(ExpertsArguments, rule.scoring),
      FIELD(ExpertsArguments, rule.normalizes), FIELD(ExpertsArguments, rule.scale),
      FIELD(ExpertsArguments, rule.num_groups), FIELD(ExpertsArguments, rule.top_groups),
      FIELD(ExpertsArguments, rule.best_of_group), FIELD(ExpertsArguments, rule.least_sum),
      FIELD(ExpertsArguments, rule.jitter), FIELD(ExpertsArguments, experts),
      FIELD(ExpertsArguments, gate_up_size), FIELD(ExpertsArguments, inner_size), FIELD(ExpertsArguments, load)},
     nullptr},
    {"causal_convolution", kStep, kRead, kNone, kMake, kNoInput, false, causal_convolution,
     {STATES(ConvolutionArguments, convolution), FIELD(ConvolutionArguments, convolution.offset),
      FIELD(ConvolutionArguments, convolution.gate_before), FIELD(ConvolutionArguments, convolution.gate_after),
      FIELD(ConvolutionArguments, convolution.channels), FIELD(ConvolutionArguments, convolution.taps),
      FIELD(ConvolutionArguments, convolution.activation), FIELD(ConvolutionArguments, convolution.weight),
      FIELD(ConvolutionArguments, convolution.bias)},
     nullptr},
    {"linear_recurrence", kStep, kRead, kRead, kMake, kNoInput, false, linear_recurrence,
     {STATES(RecurrenceArguments, recurrence), FIELD(RecurrenceArguments, recurrence.num_heads),
      FIELD(RecurrenceArguments, recurrence.num_groups), FIELD(RecurrenceArguments, recurrence.key_size),
      FIELD(RecurrenceArguments, recurrence.value_size), FIELD(RecurrenceArguments, recurrence.values),
      FIELD(RecurrenceArguments, recurrence.keys), FIELD(RecurrenceArguments, recurrence.queries),
      FIELD(RecurrenceArguments, recurrence.steps), FIELD(RecurrenceArguments, recurrence.betas),
      FIELD(RecurrenceArguments, recurrence.step_size), FIELD(RecurrenceArguments, recurrence.step_activation),
      FIELD(RecurrenceArguments, recurrence.scales_values), FIELD(RecurrenceArguments, recurrence.keeps_variance),
      FIELD(RecurrenceArguments, recurrence.has_unit_keys), FIELD(RecurrenceArguments, recurrence.decays_by_element),
      FIELD(RecurrenceArguments, recurrence.skips_by_value), FIELD(RecurrenceArguments, recurrence.step_scale),
      FIELD(RecurrenceArguments, recurrence.min_step), FIELD(RecurrenceArguments, recurrence.max_step),
      FIELD(RecurrenceArguments, recurrence.beta_scale), FIELD(RecurrenceArguments, recurrence.query_scale),
      FIELD(RecurrenceArguments, recurrence.decay_log), FIELD(RecurrenceArguments, recurrence.step_bias),
      FIELD(RecurrenceArguments, recurrence.skip)},
     nullptr},
    {"gated_norm", kRows, kRead, kRead, kMake, kNoInput, false, gated_norm,
     {FIELD(GatedNormArgs, size), FIELD(GatedNormArgs, offset), FIELD(GatedNormArgs, group_size),
      FIELD(GatedNormArgs, weight), FIELD(GatedNormArgs, weight_stride), FIELD(GatedNormArgs, eps),
      FIELD(GatedNormArgs, gate_scale), FIELD(GatedNormArgs, gates_first), FIELD(GatedNormArgs, activation)},
     nullptr},
    {"group_squares", kRows, kRead, kNone, kMake, kNoInput, false, group_squares, {SHARED_GROUP}, nullptr},
    {"shared_group_norm", kRows, kRead, kRead, kMake, kNoInput, false, shared_group_norm,
     {SHARED_GROUP, FIELD(SharedGroupArguments, weight), FIELD(SharedGroupArguments, eps)},
     nullptr},
    {"keep_last", kRows, kChange, kNone, kNone, kNoInput, false, keep_last, {}, nullptr},
    {"narrow", kStep, kChange, kNone, kNone, kNoInput, false, narrow, {}, nullptr},
};

}  // namespace

const OperationType* operation_type(int64_t number) {
  return number >= 0 && number < static_cast<int64_t>(std::size(kTypes)) ? &kTypes[number] : nullptr;
}

}  // namespace penstock
