#include "step.h"

#include <algorithm>

namespace penstock {

void gather_step(const GatherArgs& a) {
  for (int64_t r = 0; r < a.num_rows; ++r)
    a.seq_lens[r] = static_cast<int32_t>(a.num_computed[a.slots[r]] + a.num_scheduled[r]);
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    const int64_t slot = a.slots[a.token_rows[t]];
    a.positions[t] = a.num_computed[slot] + a.token_offsets[t];
    a.input_ids[t] = a.all_token_ids[slot * a.width + a.positions[t]];
  }
}

void gather_blocks(const GatherArgs& a, const TableArgs& table) {
  for (int64_t r = 0; r < a.num_rows; ++r)
    std::copy_n(table.all_blocks + a.slots[r] * table.width, table.columns, table.blocks + r * table.columns);
  for (int64_t t = 0; t < a.num_actual_tokens; ++t) {
    const int64_t block = a.positions[t] / table.block_size;
    const int64_t id = table.all_blocks[a.slots[a.token_rows[t]] * table.width + block];
    table.slot_mapping[t] = id * table.block_size + a.positions[t] - block * table.block_size;
  }
  std::fill(table.slot_mapping + a.num_actual_tokens, table.slot_mapping + a.num_tokens, -1);
}

void step_outcome(const OutcomeArgs& a) {
  int64_t *tokens = a.outcome, *counts = tokens + a.num_rows, *failures = counts + a.num_rows;
  for (int64_t r = 0; r < a.num_rows; ++r) {
    tokens[r] = a.sampled[r];
    counts[r] = a.seq_lens[r] >= a.prefill_lens[a.slots[r]];
    failures[r] = a.failure_size == 1 ? static_cast<const uint8_t*>(a.failures)[r]
                                      : static_cast<const int64_t*>(a.failures)[r];
  }
}

void advance_state(const AdvanceArgs& a) {
  const int64_t *tokens = a.outcome, *counts = tokens + a.num_rows;
  for (int64_t r = 0; r < a.num_rows; ++r) {
    const int64_t slot = a.slots[r];
    if (counts[r] > 0) a.all_token_ids[slot * a.width + a.total_len[slot]] = static_cast<int32_t>(tokens[r]);
    a.total_len[slot] += counts[r];
    a.num_computed[slot] += a.num_scheduled[r];
  }
}

}  // namespace penstock
