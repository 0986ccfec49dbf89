#include "parallel.h"

#include <cstring>

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#endif

namespace penstock {
namespace {

// The entry points that GCC's and LLVM's OpenMP runtimes have in common.
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
  // The runtime may grant fewer threads than asked for.
  Team team{omp->num_threads(), omp->barrier};
  region->body(region->data, omp->thread_num(), team);
}

void no_barrier() {}

}  // namespace

void run_parallel(int num_threads, void (*body)(void*, int, const Team&), void* data) {
  const Runtime* omp = num_threads > 1 ? runtime() : nullptr;
  if (omp == nullptr) {
    Team alone{1, no_barrier};
    body(data, 0, alone);
    return;
  }
  Region region{body, data};
  omp->parallel(enter_region, &region, static_cast<unsigned>(num_threads), 0);
}

const char* runtime_name() {
  const Runtime* omp = runtime();
  return omp != nullptr ? omp->name : nullptr;
}

}  // namespace penstock
