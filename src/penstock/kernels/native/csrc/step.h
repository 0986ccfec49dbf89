// Gathers a step's inputs from the per-slot state, and updates that state; the same on every CPU.
#pragma once

#include <cstdint>

namespace penstock {

// Block table and slot mapping of a step in one KV-cache group.
struct TableArgs {
  const int32_t* all_blocks;  // [slots][width]
  int64_t width, block_size;
  int32_t* blocks;  // [rows][stride]: each row's first blocks in the leading columns
  int64_t columns, stride;
  int64_t* slot_mapping;  // [tokens]: block id * block_size + offset; -1 for padding
};

// Draft tokens of a step's actual requests; num_drafts is null without drafts.
struct DraftArgs {
  const int32_t* token_ids;  // [slots][width]
  int64_t width;
  const int64_t* num_drafts;  // [rows]
  const int64_t* num_checked;  // [rows]: drafts that may be accepted
  const int64_t* first_rows;   // [rows]: each request's first logits row
  int64_t num_rows;
};

// Positions and input tokens of a step. Rows are the step's requests, padding ones included.
struct GatherArgs {
  int32_t* all_token_ids;  // [slots][width]; the step's drafts are written after the known tokens
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

// Outcome of a step, equal to verify_drafts in step_state.py.
struct OutcomeArgs {
  const int32_t* seq_lens;      // [rows]
  const int64_t* prefill_lens;  // [slots]
  const int64_t* slots;         // [rows]
  int64_t num_rows;
  const int64_t* sampled;  // [logits rows]
  const void* failures;    // [logits rows], failure_size bytes each: 1 or 8
  int64_t failure_size;
  int64_t columns;   // sampled tokens per request: 1 + the maximum number of drafts
  int64_t* outcome;  // [rows][columns, num_sampled, num_rejected, failure]
  DraftArgs drafts;
};

// Appends sampled tokens, advances total_len by their number and num_computed by the scheduled tokens less the
// rejected.
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
// Reads the positions from gather_step.
void gather_blocks(const GatherArgs&, const TableArgs&);
void step_outcome(const OutcomeArgs&);
void advance_state(const AdvanceArgs&);

}  // namespace penstock
