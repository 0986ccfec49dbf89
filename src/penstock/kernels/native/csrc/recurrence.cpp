#include "recurrence.h"

#include <cmath>
#include <cstring>

#include "program.h"

namespace penstock {
namespace {

// Fills in the step's requests, and zeroes the output rows of padding; false without any token.
bool begin(StatePages& states, int64_t group, const Call& call) {
  const ProgramStep& step = *call.step;
  const StepRequests& requests = step.groups[group];
  states.query_start = requests.query_start;
  states.seq_lens = requests.seq_lens;
  states.block_table = requests.block_table;
  states.block_table_stride = requests.block_table_stride;
  states.num_requests = requests.num_requests;
  std::memset(call.out.at + step.num_tokens * call.out.stride, 0,
              (step.num_rows - step.num_tokens) * call.out.stride * sizeof(float));
  return step.num_tokens > 0;
}

}  // namespace

Result causal_convolution(const Operation& operation, const Call& call) {
  auto arguments = operation.get<ConvolutionArguments>();
  ConvolutionArgs& a = arguments.convolution;
  if (!begin(a.states, arguments.group, call)) return kDone;
  a.x = call.x.at;
  a.x_stride = call.x.stride;
  a.out = call.out.at;
  a.out_stride = call.out.stride;
  a.num_threads = call.num_threads;
  call.kernels->convolve(a);
  return kDone;
}

Result linear_recurrence(const Operation& operation, const Call& call) {
  auto arguments = operation.get<RecurrenceArguments>();
  RecurrenceArgs& a = arguments.recurrence;
  if (!begin(a.states, arguments.group, call)) return kDone;
  a.mixed = call.x.at;
  a.mixed_stride = call.x.stride;
  a.gates = call.second.at;
  a.gates_stride = call.second.stride;
  a.out = call.out.at;
  a.out_stride = call.out.stride;
  a.num_threads = call.num_threads;
  return {call.kernels->recur(a), 0};
}

Result gated_norm(const Operation& operation, const Call& call) {
  GatedNormArgs a = operation.get<GatedNormArgs>();
  a.x = call.x.at;
  a.x_stride = call.x.stride;
  a.gate = call.second.at;
  a.gate_stride = call.second.stride;
  a.out = call.out.at;
  a.rows = call.num_rows;
  a.num_threads = call.num_threads;
  call.kernels->gated_norm(a);
  return kDone;
}

Result group_squares(const Operation& operation, const Call& call) {
  const auto a = operation.get<SharedGroupArguments>();
  std::memset(call.out.at, 0, call.num_rows * call.out.stride * sizeof(float));
  for (int64_t row = 0; row < call.num_rows; ++row) {
    const float* x = call.x.at + row * call.x.stride;
    double sum = 0.0;
    for (int64_t i = 0; i < a.size; ++i) sum += static_cast<double>(x[i]) * x[i];
    call.out.at[row * call.out.stride + a.group] = static_cast<float>(sum);
  }
  return kDone;
}

Result shared_group_norm(const Operation& operation, const Call& call) {
  const auto a = operation.get<SharedGroupArguments>();
  for (int64_t row = 0; row < call.num_rows; ++row) {
    const float* x = call.x.at + row * call.x.stride;
    float* out = call.out.at + row * call.out.stride;
    const float squares = call.second.at[row * call.second.stride + a.group];
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(a.group_size) + a.eps);
    for (int64_t i = 0; i < a.size; ++i) out[i] = x[i] * scale * a.weight[i];
  }
  return kDone;
}

}  // namespace penstock
