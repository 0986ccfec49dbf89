// How a step reads and advances the runner's per-slot state; the same on every processor.
#pragma once

#include <cstdint>

namespace penstock {

// Where a step's tokens lie in the blocks of one KV-cache group.
struct TableArgs {
  const int32_t* all_blocks;  // [slots][width]
  int64_t width, block_size;
  int32_t* blocks;  // [rows][columns]: each row's first blocks
  int64_t columns;
  int64_t* slot_mapping;  // [tokens]: block id * block_size + offset; -1 for padding
};

// Position and token of everything that a step runs. Rows are the step's requests, padding ones included.
struct GatherArgs {
  const int32_t* all_token_ids;  // [slots][width]
  int64_t width;
  const int64_t* num_computed;   // [slots]
  const int64_t* slots;          // [rows]
  const int64_t* num_scheduled;  // [rows]
  const int64_t* token_rows;     // [tokens]
  const int64_t* token_offsets;  // [tokens]
  int64_t num_rows, num_tokens, num_actual_tokens;
  int32_t* input_ids;  // [tokens]
  int64_t* positions;  // [tokens]
  int32_t* seq_lens;   // [rows]
};

// What the host is told. A token counts, 1, where the step reached the end of a request's known tokens; 0 for an
// unfinished prefill.
struct OutcomeArgs {
  const int32_t* seq_lens;      // [rows]
  const int64_t* prefill_lens;  // [slots]
  const int64_t* slots;         // [rows]
  int64_t num_rows;
  const int64_t* sampled;  // [rows]
  const void* failures;    // [rows], of failure_size bytes each: 1 or 8
  int64_t failure_size;
  int64_t* outcome;  // [sampled, counts, failures][rows]
};

// Appends sampled tokens, advances total_len by their number and num_computed by what was run.
struct AdvanceArgs {
  int32_t* all_token_ids;  // [slots][width]
  int64_t width;
  int64_t* total_len;            // [slots]
  int64_t* num_computed;         // [slots]
  const int64_t* slots;          // [rows]
  const int64_t* num_scheduled;  // [rows]
  int64_t num_rows;
  const int64_t* outcome;  // [sampled, counts, failures][rows]
};

void gather_step(const GatherArgs&);
// After gather_step, whose positions it reads.
void gather_blocks(const GatherArgs&, const TableArgs&);
void step_outcome(const OutcomeArgs&);
void advance_state(const AdvanceArgs&);

}  // namespace penstock
