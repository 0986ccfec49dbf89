#include "parallel.h"

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

// One iteration of a spin loop: a CPU pause at first, later a yield to the scheduler of the operating system.
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
#if defined(__linux__)
    sched_yield();
#endif
  }

 private:
  static constexpr int kTurnsAwake = 256;
  int turns_ = 0;
};

// Threads of one parallel region that spin for work from its first thread.
class Crew {
 public:
  // First thread: calls main(data), then releases the other threads.
  void lead(int size, void (*main)(void*), void* data) {
    size_ = size;
    current = this;
    main(data);
    current = nullptr;
    body_ = nullptr;
    call_.fetch_add(1, std::memory_order_release);
  }

  // Loop of the other threads.
  void stand_by(int thread) {
    current = this;
    for (uint32_t seen = 0;; ++seen) {
      Waiting waiting;
      while (call_.load(std::memory_order_acquire) == seen) waiting.turn();
      if (body_ == nullptr) break;
      if (thread < team_.num_threads) body_(data_, thread, team_);
      busy_.fetch_sub(1, std::memory_order_release);
    }
    current = nullptr;
  }

  // First thread: `run_parallel`.
  void run(int num_threads, void (*body)(void*, int, const Team&), void* data) {
    team_ = {num_threads < size_ ? num_threads : size_, wait_for_team};
    body_ = body;
    data_ = data;
    busy_.store(size_ - 1, std::memory_order_relaxed);
    call_.fetch_add(1, std::memory_order_release);
    body(data, 0, team_);
    Waiting waiting;
    while (busy_.load(std::memory_order_acquire) != 0) waiting.turn();
  }

  // The crew that this thread leads or works in.
  static thread_local Crew* current;

 private:
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
  }

  int size_ = 1;
  void (*body_)(void*, int, const Team&) = nullptr;
  void* data_ = nullptr;
  Team team_{1, no_barrier};
  // Separate cache lines, against false sharing.
  alignas(64) std::atomic<uint32_t> call_{0};
  alignas(64) std::atomic<int> busy_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

thread_local Crew* Crew::current = nullptr;

struct StandingBy {
  void (*main)(void*);
  void* data;
  Crew crew;
};

void enter_crew(void* data, int thread, const Team& team) {
  auto* job = static_cast<StandingBy*>(data);
  if (thread == 0)
    job->crew.lead(team.num_threads, job->main, job->data);
  else
    job->crew.stand_by(thread);
}

}  // namespace

void run_parallel(int num_threads, void (*body)(void*, int, const Team&), void* data) {
  const Runtime* omp = num_threads > 1 ? runtime() : nullptr;
  if (omp == nullptr) {
    Team alone{1, no_barrier};
    body(data, 0, alone);
    return;
  }
  if (Crew::current != nullptr) return Crew::current->run(num_threads, body, data);
  Region region{body, data};
  omp->parallel(enter_region, &region, static_cast<unsigned>(num_threads), 0);
}

void with_threads_standing_by(int num_threads, void (*main)(void*), void* data) {
  if (num_threads < 2 || runtime() == nullptr || Crew::current != nullptr) return main(data);
  StandingBy job{main, data, {}};
  run_parallel(num_threads, enter_crew, &job);
}

const char* runtime_name() {
  const Runtime* omp = runtime();
  return omp != nullptr ? omp->name : nullptr;
}

}  // namespace penstock
