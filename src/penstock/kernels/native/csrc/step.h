// Gathering of a step's inputs from the per-slot state, and its update; the same on every CPU.
#pragma once

#include <cstdint>

namespace penstock {

// Where a step's tokens lie in the blocks of one KV-cache group.
struct TableArgs {
  const int32_t* all_blocks;  // [slots][width]
  int64_t width, block_size;
  int32_t* blocks;  // [rows][stride]: in the first columns each row's first blocks
  int64_t columns, stride;
  int64_t* slot_mapping;  // [tokens]: block id * block_size + offset; -1 for padding
};

// The drafts of a step's actual requests; num_drafts is null where it has none.
struct DraftArgs {
  const int32_t* token_ids;  // [slots][width]
  int64_t width;
  const int64_t* num_drafts;  // [rows]
  const int64_t* num_checked;  // [rows]: those that may be accepted
  const int64_t* first_rows;   // [rows]: each request's first logits row
  int64_t num_rows;
};

// Position and token of everything that a step runs. Rows are the step's requests, padding ones included.
struct GatherArgs {
  int32_t* all_token_ids;  // [slots][width]; the step's drafts are written behind the known tokens
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
  DraftArgs drafts;
  const int64_t* total_len;  // [slots]
};

// What came of a step: see verify_drafts in step_state.py, which says the same.
struct OutcomeArgs {
  const int32_t* seq_lens;      // [rows]
  const int64_t* prefill_lens;  // [slots]
  const int64_t* slots;         // [rows]
  int64_t num_rows;
  const int64_t* sampled;  // [logits rows]
  const void* failures;    // [logits rows], of failure_size bytes each: 1 or 8
  int64_t failure_size;
  int64_t columns;   // of sampled tokens: 1 + the most drafts of a request
  int64_t* outcome;  // [rows][columns, num_sampled, num_rejected, failure]
  DraftArgs drafts;
};

// Appends sampled tokens, advances total_len by their number and num_computed by what was run and not rejected.
struct AdvanceArgs {
  int32_t* all_token_ids;  // [slots][width]
  int64_t width;
  int64_t* total_len;            // [slots]
  int64_t* num_computed;         // [slots]
  const int64_t* slots;          // [rows]
  const int64_t* num_scheduled;  // [rows]
  int64_t num_rows;
  int64_t columns;
  const int64_t* outcome;  // as in OutcomeArgs
};

void gather_step(const GatherArgs&);
// After gather_step, whose positions it reads.
void gather_blocks(const GatherArgs&, const TableArgs&);
void step_outcome(const OutcomeArgs&);
void advance_state(const AdvanceArgs&);

}  // namespace penstock
