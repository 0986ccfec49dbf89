// Decode context parallel attention: ranks shard the positions of the same KV heads.
#pragma once

#include "kernels.h"
#include "collectives.h"

namespace penstock {

// collective_status: of the collective that failed; 0 for none.
struct AttentionOutcome {
  bool had_memory;
  int64_t collective_status;
};

// Equals `attention` over all positions: queries and output are of this rank's heads; num_shares and share are ignored.
// Queries are all-gathered, each rank attends with all heads to its own KV shard, and the partial outputs are merged
// per rank. Output rows are contiguous. With one rank no collective runs.
AttentionOutcome attention_of_ranks(const Kernels& kernels, AttentionArgs args, const Ranks& ranks);

}  // namespace penstock
