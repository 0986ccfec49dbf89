#include "parallel.h"

#include "pace.h"

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#include <sched.h>
#endif

namespace penstock {
namespace {

// Entry points common to GCC's and LLVM's OpenMP runtimes.
struct Runtime {
  char name[512];
  void (*parallel)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
  void (*barrier)();
  int (*thread_num)();
  int (*num_threads)();
};

#if defined(__linux__)
int try_library(dl_phdr_info* info, size_t, void* found) {
  auto* runtime = static_cast<Runtime*>(found);
  if (info->dlpi_name == nullptr || std::strlen(info->dlpi_name) >= sizeof runtime->name) return 0;
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* base = slash != nullptr ? slash + 1 : info->dlpi_name;
  bool is_openmp = std::strncmp(base, "libgomp", 7) == 0 || std::strncmp(base, "libomp", 6) == 0 ||
                   std::strncmp(base, "libiomp", 7) == 0;
  if (is_openmp) std::strcpy(runtime->name, info->dlpi_name);
  return is_openmp;
}

bool find_runtime(Runtime& runtime) {
  if (dl_iterate_phdr(try_library, &runtime) == 0) return false;
  void* library = dlopen(runtime.name, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return false;
  runtime.parallel = reinterpret_cast<decltype(runtime.parallel)>(dlsym(library, "GOMP_parallel"));
  runtime.barrier = reinterpret_cast<decltype(runtime.barrier)>(dlsym(library, "GOMP_barrier"));
  runtime.thread_num = reinterpret_cast<decltype(runtime.thread_num)>(dlsym(library, "omp_get_thread_num"));
  runtime.num_threads = reinterpret_cast<decltype(runtime.num_threads)>(dlsym(library, "omp_get_num_threads"));
  return runtime.parallel && runtime.barrier && runtime.thread_num && runtime.num_threads;
}
#else
bool find_runtime(Runtime&) { return false; }
#endif

const Runtime* runtime() {
  static Runtime found{};
  static const bool is_there = find_runtime(found);
  return is_there ? &found : nullptr;
}

struct Region {
  void (*body)(void*, int, const Team&);
  void* data;
};

void enter_region(void* arg) {
  auto* region = static_cast<Region*>(arg);
  const Runtime* omp = runtime();
  // The runtime may grant fewer threads than requested.
  Team team{omp->num_threads(), omp->barrier};
  region->body(region->data, omp->thread_num(), team);
}

void no_barrier() {}

// Shortest wait that shows that another thread was not run.
constexpr double kAway = 3e-4;

// A spin loop: a CPU pause at first, later a yield to the scheduler of the operating system.
class Waiting {
 public:
  void turn() {
    if (turns_ < kTurnsAwake) {
      ++turns_;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      return;
    }
    if (began_ == 0) began_ = seconds_now();
#if defined(__linux__)
    sched_yield();
#endif
  }

  // Seconds of a wait that was long enough for the other thread not to have run; 0 otherwise. Threads whose work is not
  // equal wait for each other too, but less.
  double lost() const {
    if (began_ == 0) return 0;
    const double waited = seconds_now() - began_;
    return waited > kAway ? waited : 0;
  }

 private:
  static constexpr int kTurnsAwake = 256;
  int turns_ = 0;
  double began_ = 0;
};

// Threads of one parallel region that spin for work from its first thread.
class Crew {
 public:
  // First thread: calls main(data), then releases the other threads.
  void lead(int size, void (*main)(void*), void* data) {
    size_ = size;
    began_ = seconds_now();
    current = this;
    is_first = true;
    main(data);
    current = nullptr;
    is_first = false;
    if (size_ > 1) dismiss();
  }

  // Loop of the other threads.
  void stand_by(int thread) {
    current = this;
    uint32_t waits = 0;
    for (uint32_t seen = 0;; ++seen) {
      Waiting waiting;
      while (call_.load(std::memory_order_acquire) == seen) waiting.turn();
      if (thread == 1 && seen != 0 && waits == waits_elsewhere_.load(std::memory_order_relaxed)) lost_by_first_ += waiting.lost();
      if (body_ == nullptr) break;
      if (thread < team_.num_threads) body_(data_, thread, team_);
      waits = waits_elsewhere_.load(std::memory_order_relaxed);
      busy_.fetch_sub(1, std::memory_order_release);
    }
    current = nullptr;
  }

  // First thread: `run_parallel`.
  void run(int num_threads, void (*body)(void*, int, const Team&), void* data) {
    if (lost() > kMostLost && size_ > 1 && lost() * size_ > seconds_now() - began_) dismiss();
    if (size_ == 1) {
      Team alone{1, no_barrier};
      body(data, 0, alone);
      return;
    }
    team_ = {num_threads < size_ ? num_threads : size_, wait_for_team};
    body_ = body;
    data_ = data;
    busy_.store(size_ - 1, std::memory_order_relaxed);
    call_.fetch_add(1, std::memory_order_release);
    body(data, 0, team_);
    Waiting waiting;
    while (busy_.load(std::memory_order_acquire) != 0) waiting.turn();
    lost_ += waiting.lost();
  }

  // Seconds lost so far in waits of the first thread for the others, and of the others for the first.
  double lost() const { return lost_ + lost_by_first_; }

  // First thread: the other threads wait meanwhile for more than this process's threads.
  void note_wait_elsewhere() { waits_elsewhere_.fetch_add(1, std::memory_order_relaxed); }

  // The crew that this thread leads or works in.
  static thread_local Crew* current;
  static thread_local bool is_first;

 private:
  // Loss in seconds after which a crew goes on without its other threads.
  static constexpr double kMostLost = 20e-3;

  // Sends the other threads away.
  void dismiss() {
    size_ = 1;
    body_ = nullptr;
    call_.fetch_add(1, std::memory_order_release);
  }

  // Barrier; the last thread to arrive releases the others.
  static void wait_for_team() {
    Crew& crew = *current;
    const uint32_t round = crew.round_.load(std::memory_order_relaxed);
    if (crew.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == crew.team_.num_threads) {
      crew.arrived_.store(0, std::memory_order_relaxed);
      crew.round_.store(round + 1, std::memory_order_release);
      return;
    }
    Waiting waiting;
    while (crew.round_.load(std::memory_order_acquire) == round) waiting.turn();
    if (is_first) crew.lost_ += waiting.lost();
  }

  int size_ = 1;
  void (*body_)(void*, int, const Team&) = nullptr;
  void* data_ = nullptr;
  Team team_{1, no_barrier};
  double lost_ = 0, began_ = 0;
  // Separate cache lines, against false sharing.
  alignas(64) std::atomic<uint32_t> call_{0};
  alignas(64) std::atomic<int> busy_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<uint32_t> waits_elsewhere_{0};
  alignas(64) double lost_by_first_ = 0;
};

thread_local Crew* Crew::current = nullptr;
thread_local bool Crew::is_first = false;
thread_local Pace pace;

struct StandingBy {
  void (*main)(void*);
  void* data;
  Crew crew;
  double ended = 0;
};

void enter_crew(void* data, int thread, const Team& team) {
  auto* job = static_cast<StandingBy*>(data);
  if (thread == 0)
    job->crew.lead(team.num_threads, job->main, job->data), job->ended = seconds_now();
  else
    job->crew.stand_by(thread);
}

}  // namespace

// Runs body on `num_threads` threads of the runtime.
static void open_region(int num_threads, void (*body)(void*, int, const Team&), void* data) {
  const Runtime* omp = num_threads > 1 ? runtime() : nullptr;
  if (omp == nullptr) {
    Team alone{1, no_barrier};
    body(data, 0, alone);
    return;
  }
  Region region{body, data};
  omp->parallel(enter_region, &region, static_cast<unsigned>(num_threads), 0);
}

void run_parallel(int num_threads, void (*body)(void*, int, const Team&), void* data) {
  if (num_threads > 1 && Crew::current != nullptr) return Crew::current->run(num_threads, body, data);
  if (num_threads > 1 && pace.limit() != 0 && pace.limit() < num_threads) num_threads = pace.limit();
  open_region(num_threads, body, data);
}

void with_threads_standing_by(int num_threads, void (*main)(void*), void* data) {
  if (num_threads < 2 || runtime() == nullptr || Crew::current != nullptr) return main(data);
  const double began = seconds_now();
  const int granted = pace.threads(num_threads, began);
  if (granted < 2) return main(data);
  StandingBy job{main, data, {}};
  open_region(granted, enter_crew, &job);
  const double ended = seconds_now();
  // Also the wait for a thread that was taken away as the region ended.
  const double at_the_end = ended - job.ended;
  pace.note(num_threads, granted, ended - began, job.crew.lost() + (at_the_end > kAway ? at_the_end : 0), ended);
}

void note_wait_elsewhere() {
  if (Crew::current != nullptr) Crew::current->note_wait_elsewhere();
}



const char* runtime_name() {
  const Runtime* omp = runtime();
  return omp != nullptr ? omp->name : nullptr;
}

}  // namespace penstock
