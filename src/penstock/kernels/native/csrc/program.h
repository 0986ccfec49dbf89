// A step's operations one after the other, in one call: Python between small kernels takes longer than they do.
#pragma once

#include <cstdint>
#include <vector>

#include "operations.h"

namespace penstock {

// Rows of floats, contiguous, `offset` floats per row from the beginning of what their kind has of the caller's memory.
// Their lifetimes may let them share a place.
//
// kWhole: a row for every token of a step. kPart: for those that are worked on at once between two operations of step
// scope. kOutput: the caller's output, a row for every token, one result after another. kInput: a step input of floats,
// whose number is the offset; it may be overwritten.
struct Buffer {
  enum class Kind { kWhole, kPart, kOutput, kInput } kind;
  int64_t width, offset;
};

// An operation on buffers, by their numbers; -1 where it has none.
//
// input: the step input that it reads. reads_last: of that input, the elements of last tokens, where a step asks for these
// alone. narrows: the program goes on with the rows of last tokens then.
struct Step {
  Operation operation;
  int x, second, out, input;
  bool reads_last, narrows;
};

// A step input whose elements are from 0 to num_rows - 1, as those of a table that is looked up in.
struct InputLimit {
  int input;
  int64_t num_rows;
};

// Between two operations of step scope every row is by itself: no more than `rows_at_once` of them go from kernel to kernel
// together, so that what one writes is still in a cache when the next one reads it, and takes little memory.
struct Program {
  const Kernels* kernels;
  int64_t rows_at_once;
  int64_t whole_size;  // floats per token of the buffers for whole steps
  std::vector<Buffer> buffers;
  std::vector<Step> steps;
  std::vector<InputLimit> limits;
};

// The requests of a step, in one KV-cache group.
struct StepRequests {
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_table;
  int64_t block_table_stride, num_requests;
};

// The last token of every request, where no other hidden states are asked for: after the last attention the step goes
// on with these rows alone, in this order.
struct LastTokens {
  const int64_t* rows;  // of the step, rising
  const int64_t* positions;
  const int32_t* query_start;  // 0, 1, 2 ...
  const int32_t* seq_lens;     // of each request, up to that token
  int64_t count;               // 0: all hidden states are asked for
};

// workspace: num_rows times the floats of whole buffers, then the rows at once times those of the others.
// inputs: by number, an element or a row per token. Of the tokens, the first num_tokens are no padding.
// output, or index and failed: of each row, its hidden state, or the choice after it.
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
};

// How far a program came. had_memory: false when a kernel found no memory to work in. collective_status: of the collective
// that failed, 0 for none; its step of the program, and of how many rows it was. The output is undefined in both cases.
struct ProgramOutcome {
  bool had_memory;
  int64_t collective_status, step, num_rows;
};

// Runs the steps from `begin` to `end` of the program, after those before them.
ProgramOutcome run_program(const Program& program, const ProgramStep& step, size_t begin, size_t end);

}  // namespace penstock
