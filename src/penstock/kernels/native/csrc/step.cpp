#include "step.h"

#include <algorithm>

namespace penstock {

namespace {

// First draft token of a request.
const int32_t* drafts_of(const DraftArgs& drafts, int64_t slot) { return drafts.token_ids + slot * drafts.width; }

int64_t failure(const OutcomeArgs& a, int64_t row) {
  return a.failure_size == 1 ? static_cast<const uint8_t*>(a.failures)[row]
                             : static_cast<const int64_t*>(a.failures)[row];
}

// Accepted drafts: the leading ones that equal the token sampled at the row before them, up to a row that failed.
int64_t count_accepted(const OutcomeArgs& a, int64_t r, int64_t first) {
  const int32_t* drafts = drafts_of(a.drafts, a.slots[r]);
  int64_t accepted = 0;
  while (accepted < a.drafts.num_checked[r] && a.sampled[first + accepted] == drafts[accepted] &&
         failure(a, first + accepted) == 0 && failure(a, first + accepted + 1) == 0)
    ++accepted;
  return accepted;
}

}  // namespace

void gather_step(const GatherArgs& a) {
  if (a.drafts.num_drafts != nullptr)
    for (int64_t r = 0; r < a.drafts.num_rows; ++r) {
      const int64_t slot = a.slots[r];
      const int32_t* drafts = drafts_of(a.drafts, slot);
      // A missing draft is negative, but the input token must be valid; it is not accepted.
      std::transform(drafts, drafts + a.drafts.num_drafts[r], a.all_token_ids + slot * a.width + a.total_len[slot],
                     [](int32_t token) { return std::max(token, 0); });
    }
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
    std::copy_n(table.all_blocks + a.slots[r] * table.width, table.columns, table.blocks + r * table.stride);
  for (int64_t t = 0; t < a.num_actual_tokens; ++t) {
    const int64_t block = a.positions[t] / table.block_size;
    const int64_t id = table.all_blocks[a.slots[a.token_rows[t]] * table.width + block];
    table.slot_mapping[t] = id * table.block_size + a.positions[t] - block * table.block_size;
  }
  std::fill(table.slot_mapping + a.num_actual_tokens, table.slot_mapping + a.num_tokens, -1);
}

void step_outcome(const OutcomeArgs& a) {
  const bool has_drafts = a.drafts.num_drafts != nullptr;
  int64_t* out = a.outcome;
  for (int64_t r = 0; r < a.num_rows; ++r, out += a.columns + 3) {
    const int64_t first = has_drafts ? a.drafts.first_rows[r] : r, num_drafts = has_drafts ? a.drafts.num_drafts[r] : 0;
    const int64_t accepted = has_drafts ? count_accepted(a, r, first) : 0;
    const bool is_complete = a.seq_lens[r] - num_drafts >= a.prefill_lens[a.slots[r]];
    for (int64_t j = 0; j < a.columns; ++j) out[j] = a.sampled[first + (j < accepted ? j : accepted)];
    out[a.columns] = is_complete ? 1 + accepted : 0;
    out[a.columns + 1] = num_drafts - accepted;
    out[a.columns + 2] = failure(a, first);
  }
}

void advance_state(const AdvanceArgs& a) {
  const int64_t* out = a.outcome;
  for (int64_t r = 0; r < a.num_rows; ++r, out += a.columns + 3) {
    const int64_t slot = a.slots[r], num_sampled = out[a.columns];
    int32_t* end = a.all_token_ids + slot * a.width + a.total_len[slot];
    for (int64_t j = 0; j < num_sampled; ++j) end[j] = static_cast<int32_t>(out[j]);
    a.total_len[slot] += num_sampled;
    a.num_computed[slot] += a.num_scheduled[r] - out[a.columns + 1];
  }
}

}  // namespace penstock
