/* What this machine can do at most: reading memory, and multiply-adds in float32, with all threads given; and those of
   bfloat16 pairs, where the processor has an instruction for them (AVX512-BF16), and of tiles of bfloat16 and int8 (AMX).

   ceilings THREADS -> {"memory_gb_s": median, "memory_gb_s_best": best, "memory_places": N, "gflop_s": median,
                        "gflop_s_best": best[, "bfloat16_gflop_s": median, "bfloat16_gflop_s_best": best]
                        [, "tile_bfloat16_gflop_s", "tile_int8_gop_s": the same, each with its _best]}
   Memory is read by each thread from end to end, in one place or in several at once: the faster of both counts.
   A vector is as wide as the processor's own (-march=native). */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));

enum { ACCUMULATORS = 12, NEIGHBOURS = 8, PASSES = 15, MAX_THREADS = 256 };
enum { WAYS = 2 };
static const int PLACES[WAYS] = {1, 4};
static const size_t LEAST_BYTES = (size_t)256 << 20, MOST_BYTES = (size_t)1 << 30;
static const long FMA_ROUNDS = 2000000, TILE_ROUNDS = 250000;
#if defined(__AVX512BF16__)
#include <immintrin.h>
enum { HAS_PAIRS = 1 };
#else
enum { HAS_PAIRS = 0 };
#endif

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define TILES
#include <immintrin.h>
#include <sys/syscall.h>
#endif
enum { PRODUCTS_OF_ROUND = 4 }; /* of two tiles of rows and two of weights */

typedef struct {
  pthread_barrier_t *barrier;
  const Vector *begin;
  size_t num_vectors;
  double memory_s[WAYS][PASSES], flop_s[PASSES], pairs_s[PASSES], tiles_s[PASSES], byte_tiles_s[PASSES];
  int may_use_tiles;
  float sink;
} Job;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Several times the last cache, which else holds a part of the buffer from one pass to the next. */
static size_t buffer_bytes(void) {
  size_t bytes = LEAST_BYTES;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  while ((long)bytes < 4 * cache && bytes < MOST_BYTES) bytes *= 2;
#endif
  return bytes;
}

/* Sums NEIGHBOURS vectors at a time, of each place in turn, into as many accumulators: loads bound it, not the additions.
   Processors fetch ahead for each place by itself. */
static void read_all(Job *job, int places) {
  Vector sum[NEIGHBOURS] = {{0}};
  size_t apart = job->num_vectors / places;
  for (size_t i = 0; i + NEIGHBOURS <= apart; i += NEIGHBOURS)
    for (int place = 0; place < places; place++)
      for (int s = 0; s < NEIGHBOURS; s++) sum[s] += job->begin[place * apart + i + s];
  for (int s = 0; s < NEIGHBOURS; s++) job->sink += sum[s][0];
}

static void multiply_add(Job *job) {
  Vector sum[ACCUMULATORS] = {{0}}, a = {0}, b = {0};
  a += job->sink * 1e-30f + 1.0f;
  b += 1e-9f;
  for (int k = 0; k < ACCUMULATORS; k++) sum[k] += (float)k;
  for (long i = 0; i < FMA_ROUNDS; i++) {
#pragma GCC unroll 12
    for (int k = 0; k < ACCUMULATORS; k++) sum[k] = sum[k] * a + b;
    __asm__ volatile("" : "+x"(a), "+x"(b));
  }
  for (int k = 0; k < ACCUMULATORS; k++) job->sink += sum[k][0];
}

static void multiply_add_pairs(Job *job) {
#if defined(__AVX512BF16__)
  Vector sum[ACCUMULATORS] = {{0}}, pairs = {0};
  pairs += job->sink * 1e-30f + 1.0f;
  for (int k = 0; k < ACCUMULATORS; k++) sum[k] += (float)k;
  for (long i = 0; i < FMA_ROUNDS; i++) {
#pragma GCC unroll 12
    for (int k = 0; k < ACCUMULATORS; k++) sum[k] = _mm512_dpbf16_ps(sum[k], (__m512bh)pairs, (__m512bh)pairs);
    __asm__ volatile("" : "+x"(pairs));
  }
  for (int k = 0; k < ACCUMULATORS; k++) job->sink += sum[k][0];
#else
  (void)job;
#endif
}

/* Linux gives tiles to a process that asks; 0 where it refuses, or the processor has none. */
static int ask_for_tiles(void) {
#if defined(TILES)
  return syscall(SYS_arch_prctl, 0x1023L, 18L) == 0; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
#else
  return 0;
#endif
}

#if defined(TILES)
/* Tiles of 16 rows of 64 bytes, all zero. */
static void configure_tiles(void) {
  struct {
    unsigned char palette, start_row, reserved[14];
    unsigned short row_bytes[16];
    unsigned char rows[16];
  } shapes = {.palette = 1};
  for (int tile = 0; tile < 8; tile++) shapes.row_bytes[tile] = 64, shapes.rows[tile] = 16;
  __asm__ volatile("" : : "r"(&shapes) : "memory"); /* compilers take loadconfig to read a part of it */
  _tile_loadconfig(&shapes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
}
#endif

static void multiply_tiles(Job *job) {
#if defined(TILES)
  configure_tiles();
  for (long i = 0; i < TILE_ROUNDS; i++) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
#endif
  (void)job;
}

static void multiply_byte_tiles(Job *job) {
#if defined(TILES)
  configure_tiles();
  for (long i = 0; i < TILE_ROUNDS; i++) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
#endif
  (void)job;
}

static void measure(Job *job, void (*run)(Job *), double *seconds) {
  for (int p = 0; p < PASSES; p++) {
    pthread_barrier_wait(job->barrier);
    double begin = now();
    run(job);
    pthread_barrier_wait(job->barrier);
    seconds[p] = now() - begin;
  }
}

static void *work(void *argument) {
  Job *job = argument;
  for (int p = 0; p < PASSES; p++)
    for (int way = 0; way < WAYS; way++) {
      pthread_barrier_wait(job->barrier);
      double begin = now();
      read_all(job, PLACES[way]);
      pthread_barrier_wait(job->barrier);
      job->memory_s[way][p] = now() - begin;
    }
  measure(job, multiply_add, job->flop_s);
  if (HAS_PAIRS) measure(job, multiply_add_pairs, job->pairs_s);
  if (job->may_use_tiles) {
    measure(job, multiply_tiles, job->tiles_s);
    measure(job, multiply_byte_tiles, job->byte_tiles_s);
  }
  return NULL;
}

static int ascending(const void *a, const void *b) {
  double d = *(const double *)a - *(const double *)b;
  return (d > 0) - (d < 0);
}

/* Prints a rate as further fields of the result: the median and the best of all passes. */
static void report(const char *name, double amount, double *seconds) {
  qsort(seconds, PASSES, sizeof(double), ascending);
  printf(", \"%s\": %.1f, \"%s_best\": %.1f", name, amount / seconds[PASSES / 2], name, amount / seconds[0]);
}

int main(int argc, char **argv) {
  int threads = argc > 1 ? atoi(argv[1]) : 0;
  if (threads < 1 || threads > MAX_THREADS) {
    fprintf(stderr, "usage: ceilings THREADS (1 to %d)\n", MAX_THREADS);
    return 2;
  }
  const int may_use_tiles = ask_for_tiles();
  const size_t bytes = buffer_bytes();
  float *buffer = aligned_alloc((size_t)2 << 20, bytes);
  if (!buffer) return 1;
  madvise(buffer, bytes, MADV_HUGEPAGE);
  for (size_t i = 0; i < bytes / 4; i++) buffer[i] = 1.0f;
  static Job jobs[MAX_THREADS];
  pthread_t handles[MAX_THREADS];
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, NULL, threads);
  size_t vectors = bytes / sizeof(Vector) / threads;
  for (int t = 0; t < threads; t++) {
    jobs[t].barrier = &barrier;
    jobs[t].may_use_tiles = may_use_tiles;
    jobs[t].begin = (const Vector *)buffer + t * vectors;
    jobs[t].num_vectors = vectors;
    if (pthread_create(&handles[t], NULL, work, &jobs[t])) return 1;
  }
  for (int t = 0; t < threads; t++) pthread_join(handles[t], NULL);
  double *memory_s = jobs[0].memory_s[0], *flop_s = jobs[0].flop_s;
  int places = PLACES[0];
  for (int way = 0; way < WAYS; way++) {
    double *seconds = jobs[0].memory_s[way];
    qsort(seconds, PASSES, sizeof(double), ascending);
    if (seconds[PASSES / 2] < memory_s[PASSES / 2]) {
      memory_s = seconds;
      places = PLACES[way];
    }
  }
  qsort(flop_s, PASSES, sizeof(double), ascending);
  double gb = vectors * threads * sizeof(Vector) / 1e9;
  double gflop = 2.0 * FMA_ROUNDS * ACCUMULATORS * LANES * threads / 1e9;
  printf("{\"memory_gb_s\": %.2f, \"memory_gb_s_best\": %.2f, \"memory_places\": %d, \"gflop_s\": %.1f, "
         "\"gflop_s_best\": %.1f",
         gb / memory_s[PASSES / 2], gb / memory_s[0], places, gflop / flop_s[PASSES / 2], gflop / flop_s[0]);
  if (HAS_PAIRS) {
    report("bfloat16_gflop_s", 2 * gflop, jobs[0].pairs_s);
  }
  if (may_use_tiles) {
    const double products = (double)TILE_ROUNDS * PRODUCTS_OF_ROUND * 16 * 16 * threads;
    report("tile_bfloat16_gflop_s", 2 * 32 * products / 1e9, jobs[0].tiles_s);
    report("tile_int8_gop_s", 2 * 64 * products / 1e9, jobs[0].byte_tiles_s);
  }
  printf("}\n");
  float sink = 0;
  for (int t = 0; t < threads; t++) sink += jobs[t].sink;
  return sink == 0.12345f;
}
