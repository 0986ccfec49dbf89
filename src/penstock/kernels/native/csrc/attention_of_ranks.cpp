#include "attention_of_ranks.h"

#include "scratch.h"

namespace penstock {
namespace {

int64_t gather(const Ranks& ranks, const AttentionArgs& own, int64_t num_tokens, float* queries) {
  const int64_t row_bytes = own.num_heads * own.head_size * static_cast<int64_t>(sizeof(float));
  const int64_t stride = own.query_stride * static_cast<int64_t>(sizeof(float));
  return run_collective({ranks, static_cast<int64_t>(CollectiveKind::kGather), own.query, num_tokens * row_bytes, num_tokens, queries,
               stride});
}

int64_t merge(const Ranks& ranks, const AttentionArgs& all, int64_t num_tokens, float* out) {
  const int64_t unit = (all.head_size + 1) * static_cast<int64_t>(sizeof(float)), row_bytes = all.num_heads * unit;
  return run_collective({ranks, static_cast<int64_t>(CollectiveKind::kMergeParts), all.out, num_tokens * row_bytes, num_tokens, out, 0,
               unit});
}

}  // namespace

AttentionOutcome attention_of_ranks(const Kernels& kernels, AttentionArgs args, const Ranks& ranks) {
  args.num_shares = ranks.size;
  args.share = ranks.rank;
  if (ranks.size == 1) return {kernels.attention(args), 0};
  AttentionArgs all = args;
  all.num_heads *= ranks.size;
  if (args.phase == AttentionPhase::kWrite) return {kernels.attention(all), 0};
  static thread_local Scratch scratch;
  const int64_t num_tokens = args.query_start[args.num_requests];
  all.query_stride = all.num_heads * all.head_size;
  all.out_stride = all.num_heads * (all.head_size + 1);
  float* queries = scratch.get(static_cast<size_t>(num_tokens * (all.query_stride + all.out_stride)));
  if (queries == nullptr) return {false, 0};
  all.query = queries;
  all.out = queries + num_tokens * all.query_stride;
  if (const int64_t status = gather(ranks, args, num_tokens, queries)) return {true, status};
  if (!kernels.attention(all)) return {false, 0};
  return {true, merge(ranks, all, num_tokens, args.out)};
}

}  // namespace penstock
