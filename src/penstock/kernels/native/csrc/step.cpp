#include "step.h"

namespace penstock {

void gather_step_inputs(const GatherArgs& a) {
  for (int64_t r = 0; r < a.num_rows; ++r)
    a.seq_lens[r] = static_cast<int32_t>(a.num_computed[a.slots[r]] + a.num_scheduled[r]);
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    const int64_t slot = a.slots[a.token_rows[t]];
    a.positions[t] = a.num_computed[slot] + a.token_offsets[t];
    a.input_ids[t] = a.all_token_ids[slot * a.width + a.positions[t]];
  }
}

void compute_slot_mapping(const SlotMappingArgs& a) {
  for (int64_t t = 0; t < a.num_actual_tokens; ++t) {
    const int64_t block = a.positions[t] / a.block_size;
    const int64_t id = a.block_tables[a.slots[a.token_rows[t]] * a.width + block];
    a.slot_mapping[t] = id * a.block_size + a.positions[t] - block * a.block_size;
  }
  for (int64_t t = a.num_actual_tokens; t < a.num_tokens; ++t) a.slot_mapping[t] = -1;
}

void count_sampled(const CountSampledArgs& a) {
  for (int64_t r = 0; r < a.num_rows; ++r) a.num_sampled[r] = a.seq_lens[r] >= a.prefill_lens[a.slots[r]];
}

void advance_state(const AdvanceArgs& a) {
  for (int64_t r = 0; r < a.num_rows; ++r) {
    const int64_t slot = a.slots[r];
    if (a.num_sampled[r] > 0) a.all_token_ids[slot * a.width + a.total_len[slot]] = static_cast<int32_t>(a.sampled[r]);
    a.total_len[slot] += a.num_sampled[r];
    a.num_computed[slot] += a.num_scheduled[r] - (a.num_rejected != nullptr ? a.num_rejected[r] : 0);
  }
}

}  // namespace penstock
