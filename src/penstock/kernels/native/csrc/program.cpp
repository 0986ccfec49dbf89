#include "program.h"

#include <cstring>

#include "attention_of_ranks.h"
#include "parallel.h"
#include "scratch.h"

namespace penstock {
namespace {

// What a rank has chosen for a row.
struct Choice {
  float largest;
  int32_t index;
};

// Whether this choice is larger than that of a rank before, as what is not a number counts as largest.
bool is_larger(const Choice& choice, const Choice& before) {
  const bool was_number = before.largest == before.largest;
  return was_number && (choice.largest > before.largest || choice.largest != choice.largest);
}

// Runs operations on some of a step's rows.
class Runner {
 public:
  Runner(const Program& program, const ProgramStep& step, int64_t first_row, int64_t num_rows, ProgramOutcome& outcome)
      : program_(program), step_(step), first_row_(first_row), num_rows_(num_rows), outcome_(outcome) {}

  bool run(const Operation& operation) const {
    switch (operation.kind) {
      case Operation::Kind::kNorm: return norm(operation);
      case Operation::Kind::kGate: return gate(operation);
      case Operation::Kind::kLinear: return program_.kernels->linear(of_product(operation.linear, operation));
      case Operation::Kind::kQuantizedLinear:
        return operation.quantized_kernels->linear(of_product(operation.quantized, operation));
      case Operation::Kind::kAttention: return attention(operation);
      case Operation::Kind::kLookup:
      case Operation::Kind::kRows:
      case Operation::Kind::kQuantizedRows: return operation.share.size > 0 ? look_up_share(operation) : look_up(operation);
      case Operation::Kind::kScale: return scale(operation);
      case Operation::Kind::kKeepLast: return keep_last(operation.in);
      case Operation::Kind::kGreedy: return greedy(operation);
      case Operation::Kind::kArgmax: return argmax(operation);
      case Operation::Kind::kSum: return sum(operation);
      case Operation::Kind::kConcatenate: return concatenate(operation);
      case Operation::Kind::kAllReduce: return all_reduce(operation);
      case Operation::Kind::kMergeChoices: return merge_choices(operation);
    }
    return false;
  }

  // The keys and values of all tokens, the queries of the last ones, whose rows come first from now on.
  bool last_attention(const Operation& operation) const {
    AttentionArgs a = attention_of_all(operation);
    a.phase = AttentionPhase::kWrite;
    if (!attend(operation, a)) return false;
    Runner(program_, step_, 0, step_.last.count, outcome_).keep_last(operation.in);
    a.query_start = step_.last.query_start;
    a.seq_lens = step_.last.seq_lens;
    a.positions = step_.last.positions;
    a.phase = AttentionPhase::kAttend;
    return attend(operation, a);
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
  Args of_tokens(Args a, const Operation& operation, const int32_t* ids) const {
    a.ids = ids;
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

  bool look_up(const Operation& operation, const int32_t* ids) const {
    switch (operation.kind) {
      case Operation::Kind::kLookup: program_.kernels->lookup(of_tokens(operation.lookup, operation, ids)); return true;
      case Operation::Kind::kRows: program_.kernels->rows(of_tokens(operation.rows, operation, ids)); return true;
      default: return operation.quantized_kernels->rows(of_tokens(operation.quantized_rows, operation, ids));
    }
  }

  bool look_up(const Operation& operation) const { return look_up(operation, step_.ids + first_row_); }

  bool look_up_share(const Operation& operation) const {
    static thread_local Scratch scratch;
    auto* ids = reinterpret_cast<int32_t*>(scratch.get(static_cast<size_t>(num_rows_)));
    if (ids == nullptr) return false;
    const TokenShare& share = operation.share;
    const auto is_here = [&](int64_t id) { return id >= share.start && id < share.start + share.size; };
    const int32_t* all = step_.ids + first_row_;
    for (int64_t i = 0; i < num_rows_; ++i) ids[i] = is_here(all[i]) ? static_cast<int32_t>(all[i] - share.start) : 0;
    if (!look_up(operation, ids)) return false;
    float* row = at(operation.out);
    const int64_t size = width(operation.out);
    for (int64_t i = 0; i < num_rows_; ++i, row += size)
      if (!is_here(all[i])) std::memset(row, 0, size * sizeof(float));
    return true;
  }

  bool all_reduce(const Operation& operation) const {
    float* values = at(operation.in);
    const int64_t num_bytes = num_rows_ * width(operation.in) * static_cast<int64_t>(sizeof(float));
    return meet(operation, {operation.ranks, static_cast<int64_t>(Together::kSum), values, num_bytes, 1, values});
  }

  // Of equal values the one of the first rank, whose indices are lower.
  bool merge_choices(const Operation& operation) const {
    static thread_local Scratch scratch;
    static_assert(sizeof(Choice) == 2 * sizeof(float), "choices are counted in floats");
    const int64_t size = operation.ranks.size;
    auto* own = reinterpret_cast<Choice*>(scratch.get(static_cast<size_t>(2 * (size + 1) * num_rows_)));
    if (own == nullptr) return false;
    Choice* all = own + num_rows_;
    const float* largest = at(operation.in);
    int64_t* index = step_.index + first_row_;
    for (int64_t i = 0; i < num_rows_; ++i)
      own[i] = {largest[i], static_cast<int32_t>(index[i] + operation.first_index)};
    const int64_t num_bytes = num_rows_ * static_cast<int64_t>(sizeof(Choice));
    if (!meet(operation, {operation.ranks, static_cast<int64_t>(Together::kGather), own, num_bytes, 1, all})) return false;
    for (int64_t i = 0; i < num_rows_; ++i) {
      Choice best = all[i];
      for (int64_t rank = 1; rank < size; ++rank)
        if (is_larger(all[rank * num_rows_ + i], best)) best = all[rank * num_rows_ + i];
      index[i] = best.index;
      step_.failed[first_row_ + i] = !__builtin_isfinite(best.largest);
    }
    return true;
  }

  bool meet(const Operation& operation, const MeetingArgs& args) const {
    return has_met(operation, penstock::meet(args));
  }

  bool has_met(const Operation& operation, int64_t status) const {
    if (status == 0) return true;
    outcome_ = {true, status, &operation - program_.operations.data(), num_rows_};
    return false;
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
    a.largest = operation.out < 0 ? nullptr : at(operation.out);
    return program_.kernels->greedy(a);
  }

  bool argmax(const Operation& operation) const {
    ArgmaxArgs a = of_rows(ArgmaxArgs{}, operation);
    a.size = width(operation.in);
    a.index = step_.index + first_row_;
    a.failed = step_.failed + first_row_;
    a.largest = operation.out < 0 ? nullptr : at(operation.out);
    program_.kernels->argmax(a);
    return true;
  }

  // Rows of padding become zero.
  bool attention(const Operation& operation) const {
    const AttentionArgs a = attention_of_all(operation);
    std::memset(a.out + step_.num_tokens * a.out_stride, 0,
                (step_.num_rows - step_.num_tokens) * a.out_stride * sizeof(float));
    return step_.num_tokens == 0 || attend(operation, a);
  }

  bool attend(const Operation& operation, const AttentionArgs& args) const {
    const AttentionOutcome outcome = attention_of_ranks(*program_.kernels, args, operation.ranks);
    return outcome.had_memory && has_met(operation, outcome.meeting_status);
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
  ProgramOutcome& outcome_;
};

struct Run {
  const Program& program;
  const ProgramStep& step;
  ProgramOutcome outcome;
};

// False when an operation could not be done: the outcome says which meeting it was, if it was one.
bool run_operations(const Program& program, const ProgramStep& step, ProgramOutcome& outcome) {
  const Runner whole(program, step, 0, step.num_rows, outcome);
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
      const Runner part(program, step, first, left < program.rows_at_once ? left : program.rows_at_once, outcome);
      for (size_t i = begin; i < end; ++i)
        if (!part.run(operations[i])) return false;
    }
    begin = end;
  }
  return true;
}

void run_on_crew(void* data) {
  auto* run = static_cast<Run*>(data);
  const bool is_done = run_operations(run->program, run->step, run->outcome);
  run->outcome.had_memory = is_done || run->outcome.meeting_status != 0;
}

}  // namespace

ProgramOutcome run_program(const Program& program, const ProgramStep& step) {
  Run run{program, step, {}};
  with_threads_standing_by(step.num_threads, run_on_crew, &run);
  return run.outcome;
}

}  // namespace penstock
