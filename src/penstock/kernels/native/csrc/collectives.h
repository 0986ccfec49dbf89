// Collectives and point-to-point channels between processes of one machine, in shared memory.
#pragma once

#include <cstdint>

namespace penstock {

enum class CollectiveKind : int64_t {
  kGather = 0,        // all-gather: the ranks' rows side by side
  kSum = 1,           // all-reduce of float32, added in rank order
  kSumScattered = 2,  // reduce-scatter: each rank takes an equal share of every row of the sum
  kMergeParts = 3,    // each rank's share of the merged partial attention outputs of all ranks
  kBroadcast = 4,     // plus the source rank
};

// One rank of a group, and the group's shared memory.
//
// memory: `collective_bytes`, initially zero, the same for all ranks. slot_bytes: bytes per rank and piece; a multiple
// of 8. spin_us: time a waiting rank spins before it sleeps.
struct Ranks {
  void* memory;
  int64_t rank, size, slot_bytes, timeout_us, spin_us;
};

// in: num_bytes in `rows` rows of equal size, in_stride bytes apart; 0 for contiguous rows. out: the same size,
// contiguous; for kGather that size per rank, each row rank after rank; for scattered kinds one share.
// in and out may be the same memory for kSum only.
// unit: bytes that are not split between pieces. For kMergeParts a rank's partial vector, followed by the base-2
// logarithm of the sum of its weights; out has the vectors alone.
struct CollectiveArgs {
  Ranks ranks;
  int64_t kind;
  const void* in;
  int64_t num_bytes, rows;
  void* out;
  int64_t in_stride = 0, unit = sizeof(float);
};

int64_t collective_bytes(int64_t size, int64_t slot_bytes);

// Blocks until all ranks make the same call. Returns 0; 1 + the rank that timed out; or -1 - the rank that made a
// different call. After either failure the memory is unusable, and further calls return kFailedBefore.
constexpr int64_t kFailedBefore = INT64_MIN;
int64_t run_collective(const CollectiveArgs& args);

// Number of collectives that this rank has entered, a failed one included.
int64_t collective_calls(const void* memory, int64_t rank);

// memory: `channel_bytes`, initially zero, the same for sender and receiver.
// data: the message to send, or its destination.
struct ChannelArgs {
  void* memory;
  void* data;
  int64_t num_bytes, timeout_us, spin_us;
};

int64_t channel_bytes();

// Waiting side: 1 the receiver, 2 the sender, 0 none.
int64_t channel_waits(const void* memory);

// Blocks only while the ring buffer is full; it holds several small tensors. Returns 0; or 1 on a timeout.
int64_t channel_send(const ChannelArgs& args);

// Blocks until the message arrives. Returns 0; 1 on a timeout; or -1 if a message of another size arrived. After either
// failure the memory is unusable.
int64_t channel_receive(const ChannelArgs& args);

}  // namespace penstock
