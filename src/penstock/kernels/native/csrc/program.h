// A step's kernels one after the other, in one call: Python between small kernels takes longer than they do.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "meeting.h"
#include "quantized.h"

namespace penstock {

// Rows of floats, contiguous, `offset` floats per row from the beginning of what their kind has of the caller's memory.
// Their lifetimes may let them share a place.
//
// kWhole: a row for every token of a step. kPart: for those that are worked on at once between two attentions. kOutput:
// the caller's output, a row for every token, one result after another. kInput: rows for every token that the caller
// gives, which may be overwritten.
struct Buffer {
  enum class Kind { kWhole, kPart, kOutput, kInput } kind;
  int64_t width, offset;
};

// The tokens whose rows a lookup knows, of `whole`; size is 0 where it knows all. Rows of others become zero.
struct TokenShare {
  int64_t start, size, whole;
};

// Which kernel, its buffers by number, and its arguments but for what a step decides: addresses of buffers, numbers of
// rows and threads.
struct Operation {
  // kLookup, kRows and kQuantizedRows read the step's tokens, kGreedy and kArgmax write its choices. kAllReduce adds up
  // what the ranks have in one place, and kMergeChoices takes the largest that any of them has chosen.
  enum class Kind {
    kNorm, kGate, kLinear, kQuantizedLinear, kAttention, kLookup, kRows, kQuantizedRows, kScale, kKeepLast, kGreedy, kArgmax, kSum,
    kConcatenate, kAllReduce, kMergeChoices
  } kind;
  // residual: what a norm adds to its input first, what kSum adds to it or -1, and what kConcatenate puts behind it.
  // out: of choices, the largest values, or -1.
  int in, residual, out;
  // Of attention, the group of the KV cache, and whether the step goes on with the rows of last tokens alone, where only
  // these are asked for. kKeepLast then does the same with other rows.
  int group;
  bool is_last;
  float factor;  // of kScale
  TokenShare share;
  Ranks ranks;  // of kAllReduce, kMergeChoices and kAttention
  int64_t first_index;  // of kMergeChoices: this rank's first of all
  const QuantizedKernels* quantized_kernels;
  union {
    NormArgs norm;
    GateArgs gate;
    LinearArgs linear;  // of kGreedy too
    QuantizedLinearArgs quantized;
    AttentionArgs attention;
    LookupArgs lookup;
    RowsArgs rows;
    QuantizedRowsArgs quantized_rows;
  };
};

// Between two attentions every row is by itself: no more than `rows_at_once` of them go from kernel to kernel together,
// so that what one writes is still in a cache when the next one reads it, and takes little memory.
struct Program {
  const Kernels* kernels;
  int64_t rows_at_once;
  int64_t num_ids;  // tokens that its lookup knows: from 0 to num_ids - 1
  int64_t whole_size;  // floats per token of the buffers for whole steps
  std::vector<Buffer> buffers;
  std::vector<Operation> operations;
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
// positions: int64, one per token. Of the tokens, the first num_tokens are no padding.
// ids: of each row, its token. output, or index and failed: of each row, its hidden state, or the choice after it.
// input: of each row, what the program goes on from besides.
struct ProgramStep {
  float* output;
  float* workspace;
  const int32_t* ids;
  int64_t* index;
  bool* failed;
  float* input;
  const int64_t* positions;
  int64_t num_rows, num_tokens;
  const StepRequests* groups;
  LastTokens last;
  int num_threads;
};

// How far a program came. had_memory: false when a kernel found no memory to work in. meeting_status: of the meeting
// that failed, 0 for none; its operation, and of how many rows it was. The output is undefined in both cases.
struct ProgramOutcome {
  bool had_memory;
  int64_t meeting_status, operation, num_rows;
};

ProgramOutcome run_program(const Program& program, const ProgramStep& step);

}  // namespace penstock
