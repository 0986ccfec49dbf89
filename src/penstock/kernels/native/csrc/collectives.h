// Collectives and point-to-point channels between processes of one machine, in shared memory.
#pragma once

#include <cstdint>

namespace penstock {

enum class CollectiveKind : int64_t {
  kGather = 0,        // all ranks' rows side by side
  kSum = 1,           // of float32, added in the ranks' order
  kSumScattered = 2,  // the same, of which each rank takes an equal share of every row
  kMergeParts = 3,    // each rank's share of what follows from all ranks' parts of an attention
  kBroadcast = 4,     // and the number of the rank whose bytes all get, on top
};

// One rank of a group, and the group's shared memory.
//
// memory: `collective_bytes` of zeros at first, the same for all ranks. slot_bytes: what a rank gives at a time; a multiple
// of 8. spin_us: time that a waiting rank spins.
struct Ranks {
  void* memory;
  int64_t rank, size, slot_bytes, timeout_us, spin_us;
};

// in: num_bytes in `rows` rows of equal size, in_stride bytes apart, or one after the other if that is 0. out: as many,
// contiguous; for kGather as many from every rank, a row of each rank after the other; of what is scattered a share.
// Only kSum may have both in the same place.
// unit: bytes that are not parted. For kMergeParts it is a vector that a rank has found, and behind it the logarithm, to
// the base 2, of the weight that the vector is an average by; out gets vectors alone.
struct CollectiveArgs {
  Ranks ranks;
  int64_t kind;
  const void* in;
  int64_t num_bytes, rows;
  void* out;
  int64_t in_stride = 0, unit = sizeof(float);
};

int64_t collective_bytes(int64_t size, int64_t slot_bytes);

// Waits for all ranks to make the same call. Returns 0; 1 + the rank that did not come in time; or -1 - the rank that
// makes another call. After either of the two, nothing more can be done in this memory, and kFailedBefore is returned.
constexpr int64_t kFailedBefore = INT64_MIN;
int64_t run_collective(const CollectiveArgs& args);

// How often this rank has met the others, the collective that failed included.
int64_t collective_calls(const void* memory, int64_t rank);

// memory: `channel_bytes` of zeros at first, the same for the one who sends and the one who receives.
// data: what is sent, or where it gets.
struct ChannelArgs {
  void* memory;
  void* data;
  int64_t num_bytes, timeout_us, spin_us;
};

int64_t channel_bytes();

// Waiting side: 1 the receiver, 2 the sender, 0 none.
int64_t channel_waits(const void* memory);

// Waits for room only, of which there is some for several small tensors. Returns 0; or 1 on a timeout.
int64_t channel_send(const ChannelArgs& args);

// Waits for what is sent. Returns 0; 1 if it did not come in time; or -1 if something of another size came. After either
// of the two, nothing more can be done in this memory.
int64_t channel_receive(const ChannelArgs& args);

}  // namespace penstock
