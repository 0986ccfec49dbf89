// Attention plan: the step's requests divided into work units for the threads.

namespace PENSTOCK_NAMESPACE {

// Query rows of an item, and their maximum when there are enough items for every thread.
constexpr int64_t kQueryRows = 24;
constexpr int64_t kMostQueryRows = 96;
constexpr int64_t kTilePositions = 64;
// Of a tile for products of pairs: fewer tiles are fewer turns of the softmax.
constexpr int64_t kPairedTilePositions = 128;
constexpr int64_t kChunkPositions = 1024;

// Division of positions: a part is a whole number of blocks, a tile of parts, a chunk of tiles. A part is what is packed
// for products of pairs; otherwise a tile is one part.
struct Cut {
  int64_t part, tile, chunk, blocks_per_tile;
  Cut() = default;
  Cut(int64_t block_size, CacheType type) {
    part = tile = block_size >= kTilePositions ? block_size : kTilePositions / block_size * block_size;
    chunk = tile >= kChunkPositions ? tile : kChunkPositions / tile * tile;
    const bool is_paired = type == CacheType::kBfloat16Pairs || type == CacheType::kBfloat16Tiles;
    const bool is_whole = part % (2 * kTileUnits) == 0;
    while (is_paired && is_whole && tile < kPairedTilePositions && chunk % (2 * tile) == 0) tile *= 2;
    blocks_per_tile = tile / block_size;
  }
  // Floats between two rows of a tile's scores: whole vectors, and whole panels of products.
  int64_t stride() const { return divided_up(tile, kTilePanel) * kTilePanel; }
};

// A request, in planning order: requests with a common block prefix are adjacent.
struct Member {
  int64_t request;
  int64_t shared_tiles;  // leading tiles with the same blocks as the previous member
};

// One request, or several with few tokens that share blocks. Requests with few tokens have one item per KV head, which
// may be split into its chunks.
struct Work {
  int64_t first_unit;
  int64_t first_member, num_members;
  int64_t items_per_head;
  int64_t num_heads;   // KV heads per unit
  int64_t num_splits;  // units per item; 1 for an unsplit item
  int64_t rows;        // of an item, if it is split
  float* partial;      // [kv heads / num_heads][num_splits][num_heads * rows * sums_size], if it is split
  int32_t* left;       // [kv heads / num_heads], unfinished splits
};

struct AttentionPlan {
  Cut cut;
  int64_t few_tokens;       // most tokens of a request with one item per KV head
  int64_t tokens_per_item;  // for longer requests
  int num_threads;
  Member* members;
  Work* work;  // [num_work + 1]
  int64_t num_work;
  bool writes_first;  // all keys and values are written before any are read
};

PENSTOCK_INLINE int64_t tokens_of(const AttentionArgs& a, int64_t request) {
  return a.query_start[request + 1] - a.query_start[request];
}

// First cache position visible to a query at `whole_position`; may be the end of the positions on this rank.
PENSTOCK_INLINE int64_t seen_from(const AttentionArgs& a, int64_t whole_position) {
  if (a.window < 0) return kept(a, whole_position - whole_position % -a.window);
  return a.window > 0 && whole_position >= a.window ? kept(a, whole_position - a.window + 1) : 0;
}

// End of the positions visible to a token of the step, which is at `whole_position`, in the whole request.
PENSTOCK_INLINE int64_t visible_end(const AttentionArgs& a, int64_t token, int64_t whole_position) {
  return a.visible_ends == nullptr ? whole_position + 1 : a.visible_ends[token];
}

// First position visible to any of a request's queries.
PENSTOCK_INLINE int64_t begin_of(const AttentionArgs& a, int64_t request) {
  return seen_from(a, a.seq_lens[request] - tokens_of(a, request));
}

// Chunks with visible positions; 1 if there are none.
PENSTOCK_INLINE int64_t chunks_of(const AttentionArgs& a, const Cut& cut, int64_t request) {
  const int64_t begin = begin_of(a, request), end = kept(a, a.seq_lens[request]);
  return end > begin ? (end - 1) / cut.chunk - begin / cut.chunk + 1 : 1;
}

PENSTOCK_INLINE int64_t blocks_of(const AttentionArgs& a, int64_t request) {
  return (kept(a, a.seq_lens[request]) + a.block_size - 1) / a.block_size;
}

PENSTOCK_INLINE const int32_t* table_of(const AttentionArgs& a, int64_t request) {
  return a.block_table + request * a.block_table_stride;
}

// Length in blocks of the common prefix of two requests.
PENSTOCK_INLINE int64_t common_blocks(const AttentionArgs& a, int64_t x, int64_t y) {
  const int64_t of_x = blocks_of(a, x), of_y = blocks_of(a, y), most = of_x < of_y ? of_x : of_y;
  const int32_t *blocks_x = table_of(a, x), *blocks_y = table_of(a, y);
  int64_t count = 0;
  while (count < most && blocks_x[count] == blocks_y[count]) ++count;
  return count;
}

// Lexicographic order of block tables.
PENSTOCK_INLINE bool comes_before(const AttentionArgs& a, int64_t x, int64_t y) {
  const int64_t common = common_blocks(a, x, y), of_x = blocks_of(a, x), of_y = blocks_of(a, y);
  return common < of_x && common < of_y ? table_of(a, x)[common] < table_of(a, y)[common] : of_x < of_y;
}

// Whether a request's rows can join an item of several requests: few tokens, and no window or chunk cuts its start.
PENSTOCK_INLINE bool can_share(const AttentionArgs& a, const AttentionPlan& plan, int64_t request) {
  return tokens_of(a, request) <= plan.few_tokens && begin_of(a, request) == 0 &&
         blocks_of(a, request) >= plan.cut.blocks_per_tile;
}

// Slots of a hash table for so many requests: a power of two.
PENSTOCK_INLINE int64_t slots_for(int64_t num_requests) {
  int64_t slots = 4;
  while (slots < 2 * num_requests) slots *= 2;
  return slots;
}

// Whether any two requests have the same last block of their first tile. seen: slots_for(num_requests) numbers.
static bool any_share(const AttentionArgs& a, const AttentionPlan& plan, int32_t* seen) {
  const int64_t slots = slots_for(a.num_requests), column = plan.cut.blocks_per_tile - 1;
  for (int64_t i = 0; i < slots; ++i) seen[i] = -1;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    if (!can_share(a, plan, r)) continue;
    const int32_t block = table_of(a, r)[column];
    int64_t slot = static_cast<uint32_t>(block) * 2654435761u & (slots - 1);
    for (; seen[slot] >= 0; slot = (slot + 1) & (slots - 1))
      if (seen[slot] == block) return true;
    seen[slot] = block;
  }
  return false;
}

// Sorts the members by block prefix. Requests come, and those without a common prefix stay, by rising number of tokens.
static void order_members(const AttentionArgs& a, const AttentionPlan& plan, int32_t* seen) {
  int64_t count = 0;
  if (a.num_requests > 1 && any_share(a, plan, seen)) {
    for (int64_t r = 0; r < a.num_requests; ++r) {
      if (!can_share(a, plan, r)) continue;
      int64_t low = 0, high = count++;
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (comes_before(a, r, plan.members[middle].request))
          high = middle;
        else
          low = middle + 1;
      }
      for (int64_t i = count - 1; i > low; --i) plan.members[i] = plan.members[i - 1];
      plan.members[low].request = r;
    }
    plan.members[0].shared_tiles = 0;
    for (int64_t i = 1; i < count; ++i)
      plan.members[i].shared_tiles =
          common_blocks(a, plan.members[i - 1].request, plan.members[i].request) / plan.cut.blocks_per_tile;
  }
  const bool has_sharers = count > 0;
  for (int64_t r = 0; r < a.num_requests; ++r)
    if (!has_sharers || !can_share(a, plan, r)) plan.members[count++] = {r, 0};
}

// Tokens per item of the longer requests, `tokens` in all; they share each read of keys and values. Leaves at least
// eight items to each thread.
PENSTOCK_INLINE int64_t tokens_per_item(const AttentionArgs& a, const AttentionPlan& plan, int64_t tokens) {
  const int64_t share = tokens * a.num_kv_heads / (8 * plan.num_threads);
  const int64_t most = kMostQueryRows * a.num_kv_heads / a.num_heads, fitting = share < most ? share : most;
  return fitting > plan.few_tokens ? fitting : plan.few_tokens;
}

// KV heads per unit with `rows` rows each: the heads of a block are contiguous, and one long read is faster. Leaves at
// least eight chunks to each thread, and fits the buffers.
PENSTOCK_INLINE int64_t heads_per_unit(const AttentionArgs& a, const AttentionPlan& plan, int64_t rows,
                                       int64_t num_chunks) {
  if (rows > 2 * kFewRows) return 1;
  int64_t heads = a.num_kv_heads;
  while (heads > 1 && (a.num_kv_heads % heads != 0 || heads * rows > plan.few_tokens * (a.num_heads / a.num_kv_heads) ||
                       num_chunks < heads * 8 * plan.num_threads))
    --heads;
  return heads;
}

// Groups the members into work: requests that share blocks together, while there is enough work for every thread.
static void gather_work(const AttentionArgs& a, AttentionPlan& plan) {
  int64_t tokens_of_few = 0, tokens_of_others = 0, num_chunks = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t tokens = tokens_of(a, r);
    (tokens <= plan.few_tokens ? tokens_of_few : tokens_of_others) += tokens;
  }
  const int64_t share = tokens_of_few * a.num_kv_heads / (4 * plan.num_threads);
  const int64_t most_tokens = share < plan.few_tokens ? share : plan.few_tokens;
  plan.tokens_per_item = tokens_per_item(a, plan, tokens_of_others);
  plan.num_work = 0;
  int64_t gathered = 0;
  for (int64_t i = 0; i < a.num_requests; ++i) {
    Member& member = plan.members[i];
    const int64_t tokens = tokens_of(a, member.request);
    const bool is_few = tokens <= plan.few_tokens;
    if (member.shared_tiles > 0 && gathered + tokens <= most_tokens) {
      gathered += tokens;
      ++plan.work[plan.num_work - 1].num_members;
    } else {
      gathered = tokens;
      member.shared_tiles = 0;
      Work& work = plan.work[plan.num_work++];
      work.first_member = i;
      work.num_members = 1;
      work.items_per_head = is_few ? 1 : (tokens + plan.tokens_per_item - 1) / plan.tokens_per_item;
      // Counted as if all items were small: the splits, which memory is reserved for, then depend on lengths alone.
      const int64_t smallest_items = (tokens + plan.few_tokens - 1) / plan.few_tokens;
      num_chunks += chunks_of(a, plan.cut, member.request) * smallest_items * a.num_kv_heads;
    }
  }
  plan.work[0].first_unit = 0;
  for (int64_t w = 0; w < plan.num_work; ++w) {
    Work& work = plan.work[w];
    int64_t chunks = 0, tokens = 0;
    for (int64_t i = 0; i < work.num_members; ++i) {
      const int64_t request = plan.members[work.first_member + i].request, of_member = chunks_of(a, plan.cut, request);
      chunks = of_member > chunks ? of_member : chunks;
      tokens += tokens_of(a, request);
    }
    work.rows = tokens * (a.num_heads / a.num_kv_heads);
    work.num_heads = work.items_per_head == 1 ? heads_per_unit(a, plan, work.rows, num_chunks) : 1;
    // An item is split when one unit of it exceeds a quarter of a thread's share; split items have few rows.
    const int64_t share_of_unit = num_chunks / (4 * plan.num_threads * work.num_heads);
    const bool is_split = plan.num_threads > 1 && work.items_per_head == 1 && chunks > share_of_unit + 1;
    work.num_splits = is_split ? chunks : 1;
    plan.work[w + 1].first_unit =
        work.first_unit + work.items_per_head * work.num_splits * (a.num_kv_heads / work.num_heads);
  }
}

}  // namespace PENSTOCK_NAMESPACE
