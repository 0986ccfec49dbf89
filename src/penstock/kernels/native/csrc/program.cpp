#include "program.h"

#include <cstring>

namespace penstock {
namespace {

class Runner {
 public:
  Runner(const Program& program, const ProgramStep& step) : program_(program), step_(step) {}

  bool run(const Operation& operation) const {
    switch (operation.kind) {
      case Operation::Kind::kNorm: return norm(operation);
      case Operation::Kind::kGate: return gate(operation);
      case Operation::Kind::kLinear: return linear(operation);
      case Operation::Kind::kQuantizedLinear: return quantized_linear(operation);
      case Operation::Kind::kAttention: return attention(operation);
    }
    return false;
  }

 private:
  float* at(int buffer) const {
    if (buffer == kInput) return step_.input;
    if (buffer == kOutput) return step_.output;
    return step_.workspace + program_.buffers[buffer].offset * step_.num_rows;
  }
  int64_t width(int buffer) const { return program_.buffers[buffer].width; }

  bool norm(const Operation& operation) const {
    NormArgs a = operation.norm;
    a.x = at(operation.in);
    a.x_stride = width(operation.in);
    a.residual = operation.residual < 0 ? nullptr : at(operation.residual);
    a.out = at(operation.out);
    a.rows = step_.num_rows;
    a.num_threads = step_.num_threads;
    program_.kernels->rms_norm(a);
    return true;
  }

  bool gate(const Operation& operation) const {
    GateArgs a = operation.gate;
    a.x = at(operation.in);
    a.out = at(operation.out);
    a.rows = step_.num_rows;
    a.num_threads = step_.num_threads;
    program_.kernels->gate_and_mul(a);
    return true;
  }

  bool linear(const Operation& operation) const {
    LinearArgs a = operation.linear;
    a.x = at(operation.in);
    a.x_stride = width(operation.in);
    a.out = at(operation.out);
    a.out_stride = width(operation.out);
    a.rows = step_.num_rows;
    a.num_threads = step_.num_threads;
    return program_.kernels->linear(a);
  }

  bool quantized_linear(const Operation& operation) const {
    QuantizedLinearArgs a = operation.quantized;
    a.x = at(operation.in);
    a.x_stride = width(operation.in);
    a.out = at(operation.out);
    a.out_stride = width(operation.out);
    a.rows = step_.num_rows;
    a.num_threads = step_.num_threads;
    return operation.quantized_kernels->linear(a);
  }

  // Rows of padding become zero.
  bool attention(const Operation& operation) const {
    AttentionArgs a = operation.attention;
    const StepRequests& requests = step_.groups[operation.group];
    const int64_t in_width = width(operation.in), out_width = width(operation.out);
    a.query = at(operation.in);
    a.key = a.query + a.num_heads * a.head_size;
    a.value = a.key + a.num_kv_heads * a.head_size;
    a.query_stride = a.key_stride = in_width;
    a.value_stride = in_width;
    a.out = at(operation.out);
    a.out_stride = out_width;
    a.query_start = requests.query_start;
    a.seq_lens = requests.seq_lens;
    a.block_table = requests.block_table;
    a.block_table_stride = requests.block_table_stride;
    a.num_requests = requests.num_requests;
    a.positions = step_.positions;
    a.num_threads = step_.num_threads;
    std::memset(a.out + step_.num_tokens * out_width, 0,
                (step_.num_rows - step_.num_tokens) * out_width * sizeof(float));
    return step_.num_tokens == 0 || program_.kernels->attention(a);
  }

  const Program& program_;
  const ProgramStep& step_;
};

}  // namespace

bool run_program(const Program& program, const ProgramStep& step) {
  const Runner runner(program, step);
  for (const Operation& operation : program.operations)
    if (!runner.run(operation)) return false;
  return true;
}

}  // namespace penstock
