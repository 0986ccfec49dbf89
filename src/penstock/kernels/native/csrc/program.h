// Recorded kernels of a step, run in one call: Python between small kernels takes longer than the kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "operations.h"

namespace penstock {

// Contiguous rows of floats, at `offset` floats per row in the caller's memory for their kind. Buffers whose lifetimes
// do not overlap may share memory.
//
// kWhole: a row for every token of a step. kPart: a row for every token processed at once between two operations of
// step scope. kOutput: the caller's output, a row for every token, one result after another. kInput: a step input of
// floats, whose number is the offset; it may be overwritten.
struct Buffer {
  enum class Kind { kWhole, kPart, kOutput, kInput } kind;
  int64_t width, offset;
};

// An operation on buffers, by their numbers; -1 for none.
//
// input: the step input that it reads. reads_last: it reads the last tokens' elements, where a step asks for these
// alone. narrows: in that case the program continues with the rows of last tokens.
struct Step {
  Operation operation;
  int x, second, out, input;
  bool reads_last, narrows;
};

// A step input with elements from 0 to num_rows - 1, such as ids of a lookup.
struct InputLimit {
  int input;
  int64_t num_rows;
};

// Recorded kernels. Between two operations of step scope rows are independent: up to `rows_at_once` rows go from kernel
// to kernel together, so that intermediate results stay in a cache and take little memory.
struct Program {
  const Kernels* kernels;
  int64_t rows_at_once;
  int64_t whole_size;  // floats per token of the kWhole buffers
  std::vector<Buffer> buffers;
  std::vector<Step> steps;
  std::vector<InputLimit> limits;
  // Time of each step on the first thread, which waits for the others; empty while it is not measured.
  mutable std::vector<int64_t> nanoseconds = {};
};

// Requests of a step, in one KV-cache group.
struct StepRequests {
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_table;
  int64_t block_table_stride, num_requests;
};

// Last token of every request, where no other hidden states are asked for: after the last attention the step continues
// with these rows alone, in this order.
struct LastTokens {
  const int64_t* rows;  // rows of the step, rising
  const int64_t* positions;
  const int32_t* query_start;  // 0, 1, 2 ...
  const int32_t* seq_lens;     // of each request, up to that token
  int64_t count;               // 0: all hidden states are asked for
};

// workspace: num_rows times the floats of kWhole buffers, then the rows at once times those of kPart buffers.
// inputs: by number, an element or a row per token. Tokens from num_tokens on are padding.
// output, or index and failed: per row, its hidden state, or its chosen token.
// visible_ends: as in AttentionArgs, for the attention of all tokens.
struct ProgramStep {
  float* output;
  float* workspace;
  int64_t* index;
  bool* failed;
  int64_t num_rows, num_tokens;
  int num_threads;
  LastTokens last;
  const void* const* inputs;
  const StepRequests* groups;
  const int32_t* visible_ends;
};

// Outcome of a program. had_memory: false when a kernel's scratch allocation failed. collective_status: of the
// collective that failed, 0 for none; step, num_rows: its step of the program, and its rows. The output is undefined in
// both cases.
struct ProgramOutcome {
  bool had_memory;
  int64_t collective_status, step, num_rows;
};

// Runs the steps from `begin` to `end` of the program, after those before them.
ProgramOutcome run_program(const Program& program, const ProgramStep& step, size_t begin, size_t end);

}  // namespace penstock
