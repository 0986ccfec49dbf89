// How a step reads and advances the runner's per-slot state; the same on every processor.
#pragma once

#include <cstdint>

namespace penstock {

// Position and token of everything that a step runs. Rows are the step's requests, padding ones included.
struct GatherArgs {
  const int32_t* all_token_ids;  // [slots][width]
  int64_t width;
  const int64_t* num_computed;  // [slots]
  const int64_t* slots;         // [rows]
  const int64_t* num_scheduled;  // [rows]
  const int64_t* token_rows;    // [tokens]
  const int64_t* token_offsets;  // [tokens]
  int64_t num_rows, num_tokens;
  int32_t* input_ids;   // [tokens]
  int64_t* positions;   // [tokens]
  int32_t* seq_lens;    // [rows]
};

// Where each token's keys and values are written: block id * block_size + offset; -1 from num_actual_tokens on.
struct SlotMappingArgs {
  const int32_t* block_tables;  // [slots][width]
  int64_t width;
  const int64_t* slots;       // [rows]
  const int64_t* token_rows;  // [tokens]
  const int64_t* positions;   // [tokens]
  int64_t num_tokens, num_actual_tokens, block_size;
  int64_t* slot_mapping;  // [tokens]
};

// 1 where the step reached the end of a request's known tokens, 0 for an unfinished prefill.
struct CountSampledArgs {
  const int32_t* seq_lens;      // [rows]
  const int64_t* prefill_lens;  // [slots]
  const int64_t* slots;         // [rows]
  int64_t num_rows;
  int64_t* num_sampled;  // [rows]
};

// Appends sampled tokens, advances total_len and num_computed by what was run and not rejected.
struct AdvanceArgs {
  int32_t* all_token_ids;  // [slots][width]
  int64_t width;
  int64_t* total_len;     // [slots]
  int64_t* num_computed;  // [slots]
  const int64_t* slots;   // [rows]
  const int64_t* sampled;  // [rows]
  const int64_t* num_sampled;
  const int64_t* num_scheduled;
  const int64_t* num_rejected;  // or nullptr
  int64_t num_rows;
};

void gather_step_inputs(const GatherArgs&);
void compute_slot_mapping(const SlotMappingArgs&);
void count_sampled(const CountSampledArgs&);
void advance_state(const AdvanceArgs&);

}  // namespace penstock
