// What the machine allows: GB/s of reading memory, and GFLOP/s of fused multiply-adds in single precision.
//
// ceilings THREADS MEGABYTES: prints both, the best of several passes.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define CHAINS 12
#define PASSES 5

typedef float Vec __attribute__((vector_size(LANES * 4)));

static const float* buffer;
static int64_t elements, rounds, num_threads;
static int is_reading;

static void* work(void* number) {
  int64_t thread = (intptr_t)number;
  Vec sum[CHAINS] = {{0}};
  if (is_reading) {
    int64_t step = CHAINS * LANES, share = elements / num_threads / step * step;
    const float* from = buffer + thread * share;
    for (int64_t i = 0; i < share; i += step)
      for (int c = 0; c < CHAINS; ++c) sum[c] += *(const Vec*)(from + i + c * LANES);
  } else {
    Vec a = sum[0] + 0.999f, b = sum[0] + 1e-3f;
    // The compiler must not see that the chains are all alike.
    for (int c = 0; c < CHAINS; ++c) __asm__ volatile("" : "+x"(sum[c]));
    for (int64_t i = 0; i < rounds; ++i) {
      for (int c = 0; c < CHAINS; ++c) sum[c] = sum[c] * a + b;
      __asm__ volatile("" : "+x"(a), "+x"(b));
    }
  }
  Vec total = sum[0];
  for (int c = 1; c < CHAINS; ++c) total += sum[c];
  volatile float kept = total[0];
  (void)kept;
  return NULL;
}

static double seconds(void) {
  pthread_t threads[256];
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int64_t t = 1; t < num_threads; ++t) pthread_create(&threads[t], NULL, work, (void*)(intptr_t)t);
  work((void*)0);
  for (int64_t t = 1; t < num_threads; ++t) pthread_join(threads[t], NULL);
  clock_gettime(CLOCK_MONOTONIC, &end);
  return (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
}

static double best(int reading) {
  double least = 1e9;
  is_reading = reading;
  for (int i = 0; i < PASSES; ++i) {
    double taken = seconds();
    least = taken < least ? taken : least;
  }
  return least;
}

int main(int count, char** arguments) {
  if (count != 3) return 1;
  num_threads = atoll(arguments[1]);
  int64_t bytes = atoll(arguments[2]) << 20;
  if (num_threads < 1 || num_threads > 256 || bytes < 1) return 1;
  void* memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
#ifdef MADV_HUGEPAGE
  madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  elements = bytes / 4;
  for (int64_t i = 0; i < elements; i += 512) ((float*)memory)[i] = 1;
  buffer = memory;
  rounds = 4000000;
  double read_s = best(1), arithmetic_s = best(0);
  printf("%.3f %.3f\n", bytes / read_s / 1e9, 2e-9 * num_threads * rounds * CHAINS * LANES / arithmetic_s);
  return 0;
}
