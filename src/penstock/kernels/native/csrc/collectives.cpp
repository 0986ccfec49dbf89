// Shared-memory collectives. Every rank copies a piece of its input into its own slot, increments its arrival counter,
// waits until the other ranks' counters catch up, and reads their slots. Slots are double-buffered: a rank that sees
// all ranks at the next piece knows that they have read the previous one, so one barrier per piece suffices.
#include "collectives.h"

#include "parallel.h"


#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// Description of a call, published with each piece: ranks with different ones are not in the same collective.
struct Announcement {
  int64_t kind, num_bytes, rows;

  bool operator==(const Announcement& other) const {
    return kind == other.kind && num_bytes == other.num_bytes && rows == other.rows;
  }
};

// Arrival counter of a rank. Written by that rank alone, except for the number of sleepers (threads in a futex wait on
// it).
struct alignas(128) Place {
  std::atomic<uint32_t> arrivals;
  std::atomic<uint32_t> sleepers;
  Announcement announcements[2];
  // Private to the rank.
  int64_t calls;
  bool has_failed;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "other processes know no lock of this one");

#if defined(__linux__)
void sleep_while(std::atomic<uint32_t>& word, uint32_t value, microseconds longest) {
  const auto count = longest.count();
  const timespec limit{static_cast<time_t>(count / 1000000), static_cast<long>(count % 1000000 * 1000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &limit, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}
#else
void sleep_while(std::atomic<uint32_t>&, uint32_t, microseconds) { std::this_thread::sleep_for(microseconds(50)); }

void wake_all(std::atomic<uint32_t>&) {}
#endif

bool has_arrived(const Place& place, uint32_t arrival, std::memory_order order = std::memory_order_acquire) {
  // Counters wrap around.
  return static_cast<int32_t>(place.arrivals.load(order) - arrival) >= 0;
}

bool spin_until(const Place& place, uint32_t arrival, microseconds longest) {
  const auto end = Clock::now() + longest;
  do {
    for (int turn = 0; turn < 64; ++turn) {
      if (has_arrived(place, arrival)) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  } while (Clock::now() < end);
  return false;
}

// Spins, then sleeps on a futex; false on a timeout.
bool wait_until(Place& place, uint32_t arrival, int64_t timeout_us, int64_t spin_us) {
  if (has_arrived(place, arrival)) return true;
  note_wait_elsewhere();
  const auto deadline = Clock::now() + microseconds(timeout_us);
  if (spin_until(place, arrival, microseconds(spin_us))) return true;
  // Sequentially consistent: either the arriving rank sees the sleeper, or its arrival is seen here.
  place.sleepers.fetch_add(1);
  bool is_there;
  for (;;) {
    const uint32_t seen = place.arrivals.load();
    is_there = has_arrived(place, arrival);
    const auto left = std::chrono::duration_cast<microseconds>(deadline - Clock::now());
    if (is_there || left.count() <= 0) break;
    sleep_while(place.arrivals, seen, left);
  }
  place.sleepers.fetch_sub(1);
  return is_there;
}

// Visits bytes start .. start + count of concatenated rows of equal width, as pieces of single rows.
//
// use: given the row, the piece's offset in it, the bytes before the piece, and its size.
template <class Use>
void each_row(int64_t width, int64_t start, int64_t count, Use use) {
  for (int64_t done = 0; done < count;) {
    const int64_t column = (start + done) % width, left = count - done;
    const int64_t piece = left < width - column ? left : width - column;
    use((start + done) / width, column, done, piece);
    done += piece;
  }
}

class Collective {
 public:
  explicit Collective(const CollectiveArgs& args)
      : args_(args),
        ranks_(args.ranks),
        places_(static_cast<Place*>(ranks_.memory)),
        slots_(static_cast<char*>(ranks_.memory) + ranks_.size * static_cast<int64_t>(sizeof(Place))),
        num_shares_(is_scattered() ? ranks_.size : 1),
        room_(ranks_.slot_bytes / num_shares_ / args.unit * args.unit),
        width_(args.num_bytes / args.rows / num_shares_),
        in_stride_(args.in_stride > 0 ? args.in_stride : args.num_bytes / args.rows) {}

  int64_t run() {
    Place& own = places_[ranks_.rank];
    if (own.has_failed) return kFailedBefore;
    ++own.calls;
    const int64_t num_bytes = args_.num_bytes / num_shares_;
    int64_t start = 0;
    do {
      const int64_t left = num_bytes - start, count = left < room_ ? left : room_;
      const int64_t status = exchange(start, count);
      own.has_failed = status != 0;
      if (status != 0) return status;
      take(start, count);
      start += count;
    } while (start < num_bytes);
    return 0;
  }

 private:
  char* slot(int64_t rank) const { return slots_ + (2 * rank + turn_) * ranks_.slot_bytes; }

  bool is(CollectiveKind kind) const { return args_.kind == static_cast<int64_t>(kind); }

  // Whether each rank takes its own share, which has its own part of each slot.
  bool is_scattered() const { return is(CollectiveKind::kSumScattered) || is(CollectiveKind::kMergeParts); }

  bool is_broadcast() const { return args_.kind >= static_cast<int64_t>(CollectiveKind::kBroadcast); }

  int64_t source() const { return args_.kind - static_cast<int64_t>(CollectiveKind::kBroadcast); }

  // Copies the bytes from start on of each share into this rank's slot.
  void give(int64_t start, int64_t count) {
    for (int64_t share = 0; share < num_shares_; ++share) {
      const char* from = static_cast<const char*>(args_.in) + share * width_;
      char* to = slot(ranks_.rank) + share * room_;
      each_row(width_, start, count, [&](int64_t row, int64_t column, int64_t done, int64_t piece) {
        std::memcpy(to + done, from + row * in_stride_ + column, piece);
      });
    }
  }

  // Publishes the bytes from start on, and waits for all other ranks' pieces.
  int64_t exchange(int64_t start, int64_t count) {
    Place& own = places_[ranks_.rank];
    const uint32_t arrival = own.arrivals.load(std::memory_order_relaxed) + 1;
    turn_ = arrival & 1;
    if (!is_broadcast() || source() == ranks_.rank) give(start, count);
    const Announcement announcement{args_.kind, args_.num_bytes, args_.rows};
    own.announcements[turn_] = announcement;
    own.arrivals.store(arrival);
    if (own.sleepers.load() != 0) wake_all(own.arrivals);
    for (int64_t rank = 0; rank < ranks_.size; ++rank) {
      if (rank == ranks_.rank) continue;
      if (!wait_until(places_[rank], arrival, ranks_.timeout_us, ranks_.spin_us)) return 1 + rank;
      if (!(places_[rank].announcements[turn_] == announcement)) return -1 - rank;
    }
    return 0;
  }

  void take(int64_t start, int64_t count) {
    char* out = static_cast<char*>(args_.out);
    if (is_broadcast()) {
      std::memcpy(out + start, slot(source()), count);
    } else if (is(CollectiveKind::kMergeParts)) {
      merge_parts(reinterpret_cast<float*>(out) + start / args_.unit * (args_.unit / kFloat - 1), count / args_.unit);
    } else if (is(CollectiveKind::kGather)) {
      for (int64_t rank = 0; rank < ranks_.size; ++rank) scatter(rank, start, count);
    } else {
      sum(reinterpret_cast<float*>(out + start), count / kFloat);
    }
  }

  // Another rank's contribution to this rank's share, or to the whole.
  const float* given_by(int64_t rank) const {
    return reinterpret_cast<const float*>(slot(rank) + (is_scattered() ? ranks_.rank * room_ : 0));
  }

  void sum(float* out, int64_t count) {
    const float *first = given_by(0), *second = given_by(1);
    for (int64_t i = 0; i < count; ++i) out[i] = first[i] + second[i];
    for (int64_t rank = 2; rank < ranks_.size; ++rank) {
      const float* next = given_by(rank);
      for (int64_t i = 0; i < count; ++i) out[i] += next[i];
    }
  }

  // Merges the ranks' partial attention outputs, weighted by 2 to the power of the number after each vector,
  // normalised.
  void merge_parts(float* out, int64_t count) {
    const int64_t unit = args_.unit / kFloat, size = unit - 1;
    for (int64_t i = 0; i < count; ++i, out += size) {
      const auto part = [&](int64_t rank) { return given_by(rank) + i * unit; };
      float peak = part(0)[size], mass = 0.0f;
      for (int64_t rank = 1; rank < ranks_.size; ++rank) peak = std::fmax(peak, part(rank)[size]);
      for (int64_t rank = 0; rank < ranks_.size; ++rank) mass += std::exp2(part(rank)[size] - peak);
      for (int64_t rank = 0; rank < ranks_.size; ++rank) {
        const float* from = part(rank);
        const float weight = std::exp2(from[size] - peak) / mass;
        for (int64_t d = 0; d < size; ++d) out[d] = (rank == 0 ? 0.0f : out[d]) + from[d] * weight;
      }
    }
  }

  // Copies one rank's bytes from start on to their place in the gathered rows.
  void scatter(int64_t rank, int64_t start, int64_t count) {
    char* to = static_cast<char*>(args_.out) + rank * width_;
    const char* from = slot(rank);
    each_row(width_, start, count, [&](int64_t row, int64_t column, int64_t done, int64_t piece) {
      std::memcpy(to + row * ranks_.size * width_ + column, from + done, piece);
    });
  }

  static constexpr int64_t kFloat = sizeof(float);

  const CollectiveArgs& args_;
  const Ranks& ranks_;
  Place* places_;
  char* slots_;
  const int64_t num_shares_, room_;  // room_: bytes per share and piece
  const int64_t width_, in_stride_;  // bytes of a share in a row; bytes between rows
  uint32_t turn_ = 0;
};

constexpr uint32_t kChannelPieces = 8;
constexpr int64_t kPieceBytes = 64 << 10;

struct alignas(128) Piece {
  int64_t message_bytes;
  alignas(128) char bytes[kPieceBytes];
};

// Ring buffer of a point-to-point channel: the sender counts up `sent`, the receiver `received`.
struct Channel {
  Place sent, received;
  Piece pieces[kChannelPieces];
};

void arrive(Place& place, uint32_t arrival) {
  place.arrivals.store(arrival);
  if (place.sleepers.load() != 0) wake_all(place.arrivals);
}

// use: given a piece, its offset in the message, and its size; returns whether to continue.
template <class Use>
int64_t each_piece(const ChannelArgs& args, Place& own, Place& other, uint32_t ahead, Use use) {
  Channel& box = *static_cast<Channel*>(args.memory);
  int64_t start = 0;
  do {
    const int64_t left = args.num_bytes - start, count = left < kPieceBytes ? left : kPieceBytes;
    const uint32_t arrival = own.arrivals.load(std::memory_order_relaxed) + 1;
    if (!wait_until(other, arrival - ahead, args.timeout_us, args.spin_us)) return 1;
    if (!use(box.pieces[(arrival - 1) % kChannelPieces], start, count)) return -1;
    arrive(own, arrival);
    start += count;
  } while (start < args.num_bytes);
  return 0;
}

}  // namespace

int64_t channel_bytes() { return static_cast<int64_t>(sizeof(Channel)); }

int64_t channel_waits(const void* memory) {
  const Channel& box = *static_cast<const Channel*>(memory);
  const uint32_t on_their_way = box.sent.arrivals.load() - box.received.arrivals.load();
  // A stopped process may still be counted as a sleeper after its wait is over.
  if (box.sent.sleepers.load() != 0 && on_their_way == 0) return 1;
  return box.received.sleepers.load() != 0 && on_their_way == kChannelPieces ? 2 : 0;
}

int64_t channel_send(const ChannelArgs& args) {
  Channel& box = *static_cast<Channel*>(args.memory);
  return each_piece(args, box.sent, box.received, kChannelPieces, [&](Piece& piece, int64_t start, int64_t count) {
    piece.message_bytes = args.num_bytes;
    std::memcpy(piece.bytes, static_cast<const char*>(args.data) + start, count);
    return true;
  });
}

int64_t channel_receive(const ChannelArgs& args) {
  Channel& box = *static_cast<Channel*>(args.memory);
  return each_piece(args, box.received, box.sent, 0, [&](Piece& piece, int64_t start, int64_t count) {
    if (piece.message_bytes != args.num_bytes) return false;
    std::memcpy(static_cast<char*>(args.data) + start, piece.bytes, count);
    return true;
  });
}

int64_t collective_bytes(int64_t size, int64_t slot_bytes) {
  return size * (static_cast<int64_t>(sizeof(Place)) + 2 * slot_bytes);
}

int64_t run_collective(const CollectiveArgs& args) { return Collective(args).run(); }

int64_t collective_calls(const void* memory, int64_t rank) { return static_cast<const Place*>(memory)[rank].calls; }

}  // namespace penstock
