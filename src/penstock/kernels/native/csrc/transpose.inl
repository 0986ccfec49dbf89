// Transposition of squares of elements of four bytes.

namespace PENSTOCK_NAMESPACE {

// First and second halves of the elements of two vectors in turns.
#if PENSTOCK_LANES == 16
#define PENSTOCK_FIRST_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define PENSTOCK_SECOND_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif PENSTOCK_LANES == 8
#define PENSTOCK_FIRST_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define PENSTOCK_SECOND_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#else
static_assert(kLanes == 4, "the shuffles of other vectors are missing");
#define PENSTOCK_FIRST_HALVES 0, 4, 1, 5
#define PENSTOCK_SECOND_HALVES 2, 6, 3, 7
#endif
#if defined(__clang__)
#define PENSTOCK_SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PENSTOCK_SHUFFLED(a, b, ...) __builtin_shuffle(a, b, UintVec{__VA_ARGS__})
#endif

// Transposes a square of elements of four bytes: each turn takes the upper and lower half of the rows in turns, which
// rotates the bits of an element's row and column by one.
PENSTOCK_INLINE void transpose(UintVec (&rows)[kLanes]) {
  for (int turn = 1; turn < kLanes; turn *= 2) {
    UintVec next[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = PENSTOCK_SHUFFLED(rows[i], rows[i + kLanes / 2], PENSTOCK_FIRST_HALVES);
      next[2 * i + 1] = PENSTOCK_SHUFFLED(rows[i], rows[i + kLanes / 2], PENSTOCK_SECOND_HALVES);
    }
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

#undef PENSTOCK_FIRST_HALVES
#undef PENSTOCK_SECOND_HALVES
#undef PENSTOCK_SHUFFLED

}  // namespace PENSTOCK_NAMESPACE
