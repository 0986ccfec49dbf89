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

// As `attention` of all positions does it: queries and output are of this rank's heads, and num_shares and share are not
// read. Every rank attends with the heads of all to the positions that it has, and takes what all have found for its own.
// Rows of the output follow each other. One rank exchanges nothing.
AttentionOutcome attention_of_ranks(const Kernels& kernels, AttentionArgs args, const Ranks& ranks);

}  // namespace penstock
