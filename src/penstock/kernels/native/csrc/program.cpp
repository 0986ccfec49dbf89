#include "program.h"

#include <cstring>

#include "parallel.h"

namespace penstock {
namespace {

// Runs operations on some of a step's rows.
class Runner {
 public:
  Runner(const Program& program, const ProgramStep& step, int64_t first_row, int64_t num_rows)
      : program_(program), step_(step), first_row_(first_row), num_rows_(num_rows) {}

  bool run(const Operation& operation) const {
    switch (operation.kind) {
      case Operation::Kind::kNorm: return norm(operation);
      case Operation::Kind::kGate: return gate(operation);
      case Operation::Kind::kLinear: return program_.kernels->linear(of_product(operation.linear, operation));
      case Operation::Kind::kQuantizedLinear:
        return operation.quantized_kernels->linear(of_product(operation.quantized, operation));
      case Operation::Kind::kAttention: return attention(operation);
      case Operation::Kind::kLookup: program_.kernels->lookup(of_tokens(operation.lookup, operation)); return true;
      case Operation::Kind::kRows: program_.kernels->rows(of_tokens(operation.rows, operation)); return true;
      case Operation::Kind::kQuantizedRows:
        return operation.quantized_kernels->rows(of_tokens(operation.quantized_rows, operation));
      case Operation::Kind::kScale: return scale(operation);
      case Operation::Kind::kKeepLast: return keep_last(operation.in);
      case Operation::Kind::kGreedy: return greedy(operation);
      case Operation::Kind::kArgmax: return argmax(operation);
      case Operation::Kind::kSum: return sum(operation);
      case Operation::Kind::kConcatenate: return concatenate(operation);
    }
    return false;
  }

  // The keys and values of all tokens, the queries of the last ones, whose rows come first from now on.
  bool last_attention(const Operation& operation) const {
    AttentionArgs a = attention_of_all(operation);
    a.phase = AttentionPhase::kWrite;
    if (!program_.kernels->attention(a)) return false;
    Runner(program_, step_, 0, step_.last.count).keep_last(operation.in);
    a.query_start = step_.last.query_start;
    a.seq_lens = step_.last.seq_lens;
    a.positions = step_.last.positions;
    a.phase = AttentionPhase::kAttend;
    return program_.kernels->attention(a);
  }

 private:
  float* at(int number) const {
    const Buffer& buffer = program_.buffers[number];
    if (buffer.kind == Buffer::Kind::kPart) {
      const int64_t rows = step_.num_rows < program_.rows_at_once ? step_.num_rows : program_.rows_at_once;
      return step_.workspace + program_.whole_size * step_.num_rows + buffer.offset * rows;
    }
    float* begin = buffer.kind == Buffer::Kind::kOutput  ? step_.output
                   : buffer.kind == Buffer::Kind::kInput ? step_.input
                                                         : step_.workspace;
    return begin + buffer.offset * step_.num_rows + first_row_ * buffer.width;
  }
  int64_t width(int number) const { return program_.buffers[number].width; }

  // Arguments with what all kernels of rows have.
  template <class Args>
  Args of_rows(Args a, const Operation& operation) const {
    a.x = at(operation.in);
    a.rows = num_rows_;
    a.num_threads = step_.num_threads;
    return a;
  }

  template <class Args>
  Args of_tokens(Args a, const Operation& operation) const {
    a.ids = step_.ids + first_row_;
    a.out = at(operation.out);
    a.num_ids = num_rows_;
    a.num_threads = step_.num_threads;
    return a;
  }

  template <class Args>
  Args of_product(const Args& args, const Operation& operation) const {
    Args a = of_rows(args, operation);
    a.x_stride = width(operation.in);
    a.out = at(operation.out);
    a.out_stride = width(operation.out);
    return a;
  }

  bool norm(const Operation& operation) const {
    NormArgs a = of_rows(operation.norm, operation);
    a.x_stride = width(operation.in);
    a.residual = operation.residual < 0 ? nullptr : at(operation.residual);
    a.out = at(operation.out);
    program_.kernels->rms_norm(a);
    return true;
  }

  bool gate(const Operation& operation) const {
    GateArgs a = of_rows(operation.gate, operation);
    a.out = at(operation.out);
    program_.kernels->gate_and_mul(a);
    return true;
  }

  bool scale(const Operation& operation) const {
    float* values = at(operation.in);
    for (int64_t i = 0; i < num_rows_ * width(operation.in); ++i) values[i] *= operation.factor;
    return true;
  }

  bool sum(const Operation& operation) const {
    const float* x = at(operation.in);
    float* out = at(operation.out);
    const int64_t size = num_rows_ * width(operation.in);
    if (operation.residual < 0) {
      std::memcpy(out, x, size * sizeof(float));
      return true;
    }
    const float* residual = at(operation.residual);
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] + residual[i];
    return true;
  }

  bool concatenate(const Operation& operation) const {
    const float *first = at(operation.in), *second = at(operation.residual);
    float* out = at(operation.out);
    const int64_t first_size = width(operation.in), second_size = width(operation.residual);
    for (int64_t i = 0; i < num_rows_; ++i, out += first_size + second_size) {
      std::memcpy(out, first + i * first_size, first_size * sizeof(float));
      std::memcpy(out + first_size, second + i * second_size, second_size * sizeof(float));
    }
    return true;
  }

  // These rows of last tokens, from where they are or behind, where what is before them may be other rows already.
  bool keep_last(int number) const {
    if (step_.last.count == 0) return true;
    float* rows = at(number);
    const int64_t size = width(number);
    for (int64_t i = 0; i < num_rows_; ++i) {
      const int64_t from = step_.last.rows[first_row_ + i] - first_row_;
      std::memmove(rows + i * size, rows + from * size, size * sizeof(float));
    }
    return true;
  }

  bool greedy(const Operation& operation) const {
    GreedyArgs a{};
    a.product = of_rows(operation.linear, operation);
    a.product.x_stride = width(operation.in);
    a.index = step_.index + first_row_;
    a.failed = step_.failed + first_row_;
    return program_.kernels->greedy(a);
  }

  bool argmax(const Operation& operation) const {
    ArgmaxArgs a = of_rows(ArgmaxArgs{}, operation);
    a.size = width(operation.in);
    a.index = step_.index + first_row_;
    a.failed = step_.failed + first_row_;
    program_.kernels->argmax(a);
    return true;
  }

  // Rows of padding become zero.
  bool attention(const Operation& operation) const {
    const AttentionArgs a = attention_of_all(operation);
    std::memset(a.out + step_.num_tokens * a.out_stride, 0,
                (step_.num_rows - step_.num_tokens) * a.out_stride * sizeof(float));
    return step_.num_tokens == 0 || program_.kernels->attention(a);
  }

  AttentionArgs attention_of_all(const Operation& operation) const {
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
    return a;
  }

  const Program& program_;
  const ProgramStep& step_;
  const int64_t first_row_, num_rows_;
};

struct Run {
  const Program& program;
  const ProgramStep& step;
  bool had_memory;
};

bool run_operations(const Program& program, const ProgramStep& step) {
  const Runner whole(program, step, 0, step.num_rows);
  const auto& operations = program.operations;
  int64_t num_rows = step.num_rows;
  for (size_t begin = 0; begin < operations.size();) {
    if (operations[begin].kind == Operation::Kind::kAttention) {
      const Operation& attention = operations[begin++];
      const bool is_last = attention.is_last && step.last.count > 0;
      if (!(is_last ? whole.last_attention(attention) : whole.run(attention))) return false;
      if (is_last) num_rows = step.last.count;
      continue;
    }
    size_t end = begin;
    while (end < operations.size() && operations[end].kind != Operation::Kind::kAttention) ++end;
    for (int64_t first = 0; first < num_rows; first += program.rows_at_once) {
      const int64_t left = num_rows - first;
      const Runner part(program, step, first, left < program.rows_at_once ? left : program.rows_at_once);
      for (size_t i = begin; i < end; ++i)
        if (!part.run(operations[i])) return false;
    }
    begin = end;
  }
  return true;
}

void run_on_crew(void* data) {
  auto* run = static_cast<Run*>(data);
  run->had_memory = run_operations(run->program, run->step);
}

}  // namespace

bool run_program(const Program& program, const ProgramStep& step) {
  Run run{program, step, true};
  with_threads_standing_by(step.num_threads, run_on_crew, &run);
  return run.had_memory;
}

}  // namespace penstock
