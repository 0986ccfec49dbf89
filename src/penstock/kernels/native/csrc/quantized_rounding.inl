// Quantisation of float weights to the nearest integers, straight into packed panels, in groups of kGroup.
//
// layers/quantization/quantize.py is its specification, bit for bit: sums are added in that order, and products that are
// added to something are rounded first. A lane is an output, so a group is a vector for each of its inner elements.

// Of lambdas, which would otherwise be called for each vector.
#define PENSTOCK_ALWAYS __attribute__((always_inline))

namespace PENSTOCK_NAMESPACE {

PENSTOCK_INLINE Vec widened(const float* from) { return load(from); }
PENSTOCK_INLINE Vec widened(const Float16* from) { return load(from); }

PENSTOCK_INLINE Vec magnitude(Vec x) { return (Vec)((IntVec)x & 0x7fffffff); }
PENSTOCK_INLINE Vec nearest(Vec x) {
#if defined(__x86_64__) && PENSTOCK_LANES == 8
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__x86_64__) && PENSTOCK_LANES == 16
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  return (x + kMagic) - kMagic;
#endif
}
PENSTOCK_INLINE Vec within(Vec x, float low, float high) { return min(max(x, splat(low)), splat(high)); }
PENSTOCK_INLINE Vec rounded_product(Vec a, Vec b) {
  Vec product = a * b;
#if defined(PENSTOCK_FMA_REGISTER)
  asm("" : "+" PENSTOCK_FMA_REGISTER(product));
#else
  PENSTOCK_NEEDED_NOW(product);
#endif
  return product;
}

// Outputs of a vector and inner elements of a group that are inside the weight; the packed ones beyond are zero.
struct Inside {
  UintVec outputs;  // all bits of the lanes
  int64_t inputs;

  UintVec of_unit(int unit) const {
    const int64_t bytes = inputs - 4 * unit;
    return outputs & (bytes >= 4 ? ~0u : bytes <= 0 ? 0u : (1u << 8 * bytes) - 1);
  }
};

template <class W>
PENSTOCK_INLINE void load_whole_group(const W* from, int64_t stride, Vec* group) {
  for (int64_t k = 0; k < kGroup; k += kLanes) {
    UintVec square[kLanes];
    for (int i = 0; i < kLanes; ++i) square[i] = (UintVec)widened(from + i * stride + k);
    transpose(square);
    for (int i = 0; i < kLanes; ++i) group[k + i] = (Vec)square[i];
  }
}

// Two neighbours of an output are transposed at once.
PENSTOCK_INLINE void load_whole_group(const Bfloat16* from, int64_t stride, Vec* group) {
  for (int64_t k = 0; k < kGroup; k += 2 * kLanes) {
    UintVec square[kLanes];
    for (int i = 0; i < kLanes; ++i) std::memcpy(&square[i], from + i * stride + k, sizeof square[i]);
    transpose(square);
    for (int i = 0; i < kLanes; ++i) {
      group[k + 2 * i] = (Vec)(square[i] << 16);
      group[k + 2 * i + 1] = (Vec)(square[i] & 0xffff0000u);
    }
  }
}

// Outputs beyond the weight are zero; inner elements beyond it are the last one, which leaves the group's range.
template <class W>
static __attribute__((noinline)) void load_group(const W* from, int64_t stride, int64_t outputs, int64_t inputs,
                                                 Vec* group) {
  if (outputs >= kLanes && inputs == kGroup) return load_whole_group(from, stride, group);
  W padded[kLanes * kGroup] = {};
  for (int64_t i = 0; i < least(outputs, kLanes); ++i)
    for (int64_t k = 0; k < kGroup; ++k) padded[i * kGroup + k] = from[i * stride + least(k, inputs - 1)];
  load_whole_group(padded, kGroup, group);
}

// Stores numbers as float16, rounded to nearest, and returns them. not_finite: lanes with a number that is not finite
// then.
PENSTOCK_INLINE Vec store_narrow(uint8_t* to, Vec x, IntVec& not_finite) {
  const UintVec bits = (UintVec)x, wide = bits & 0x7fffffff;
  const UintVec normal = ((wide + 0xfff + (wide >> 13 & 1)) >> 13) - (112 << 10);
  // The last bit of numbers from 0.5 on is that of the smallest float16.
  const UintVec subnormal = (UintVec)((Vec)wide + 0.5f) - 0x3f000000;
  const UintVec half = wide < 0x38800000 ? subnormal : normal;
  not_finite |= (IntVec)(half >= 0x7c00);
  const HalfVec narrow = __builtin_convertvector(half | (bits >> 16 & 0x8000), HalfVec);
  std::memcpy(to, &narrow, sizeof narrow);
  return load(reinterpret_cast<const Float16*>(to));
}

// Rounding of (x - minimum) / scale to the nearest integers of a range.
template <int kLow, int kHigh, bool kClamps = true>
class Rounding {
 public:
  Rounding(Vec scale, Vec minimum) : minimum_(minimum), divisor_(scale == Vec{} ? splat(1.0f) : scale) {
    inverse_ = 1.0f / divisor_;
    const Vec size = magnitude(divisor_);
    takes_products_ = !any((size < splat(0x1p-100f)) | (size > splat(0x1p100f)));
  }

  // Returns run(round), where round(x) is an integer as a float. Products with the inverse take the place of divisions,
  // unless a product is so near to the middle of two integers that the quotient may round to the other one.
  template <class Run>
  PENSTOCK_ALWAYS auto with(const Run& run) const {
    if (takes_products_) {
      Vec farthest{};
      const auto result = run([&](Vec x) PENSTOCK_ALWAYS {
        const Vec quotient = limited((x - minimum_) * inverse_), integer = nearest(quotient);
        farthest = max(magnitude(quotient - integer), farthest);
        return integer;
      });
      if (!any(farthest > splat(0.5f - kOff))) return result;
    }
    return run([&](Vec x) PENSTOCK_ALWAYS { return nearest(limited((x - minimum_) / divisor_)); });
  }

 private:
  static PENSTOCK_ALWAYS Vec limited(Vec x) { return kClamps ? within(x, kLow, kHigh) : x; }

  // More than the difference of quotient and product: three roundings of numbers up to 128, or up to 16.
  static constexpr float kOff = kHigh > 16 ? 0x1p-15f : 0x1p-18f;

  Vec minimum_, divisor_, inverse_;
  bool takes_products_;
};

template <int kLow, int kHigh, bool kClamps = true>
PENSTOCK_INLINE void round_on_grid(const Vec* group, Vec scale, Vec minimum, Vec* integers) {
  Rounding<kLow, kHigh, kClamps>(scale, minimum).with([&](auto round) PENSTOCK_ALWAYS {
#pragma GCC unroll 4
    for (int k = 0; k < kGroup; ++k) integers[k] = round(group[k]);
    return true;
  });
}

// Four integers of each lane as the bytes of a word, of which negative ones borrow from the next. Exact as floats.
PENSTOCK_INLINE UintVec joined(Vec first, Vec second, Vec third, Vec fourth) {
  const Vec lower = first + second * 256.0f + third * 65536.0f;
  return (UintVec)__builtin_convertvector(lower, IntVec) + ((UintVec)__builtin_convertvector(fourth, IntVec) << 24);
}

// Rounds a group of a panel's vector to int8. head: of the vector.
template <bool kWithMinimums>
static __attribute__((noinline)) void round_group(const ByteFormat<kWithMinimums>&, const Vec* group,
                                                  const Inside& inside, uint8_t* head, uint8_t* run, IntVec& failed) {
  IntVec most{};  // magnitudes as bits of floats; those of NaN are larger than infinity's
  for (int k = 0; k < kGroup; ++k) {
    const IntVec bits = (IntVec)magnitude(group[k]);
    most = bits > most ? bits : most;
  }
  const Vec scale = store_narrow(head, (Vec)most / 127.0f, failed);
  Vec integers[kGroup];
  // Small scales lose bits in float16; others keep the largest integer at 127.
  if (any((scale < splat(0x1p-16f)) | failed))
    round_on_grid<-128, 127>(group, scale, Vec{}, integers);
  else
    round_on_grid<-128, 127, false>(group, scale, Vec{}, integers);
  // Bytes of numbers that are not negative borrow nothing.
  constexpr uint32_t kPositive = 0x80808080u, kOffset = ByteFormat<kWithMinimums>::kStored == 128 ? 0 : kPositive;
  for (int unit = 0; unit < kGroupUnits; ++unit) {
    const Vec* const of = integers + 4 * unit;
    const UintVec bytes = ((joined(of[0], of[1], of[2], of[3]) + kPositive) ^ kOffset) & inside.of_unit(unit);
    std::memcpy(run + unit * kPanelVectors * sizeof bytes, &bytes, sizeof bytes);
  }
}

struct Grid {
  Vec scale, minimum;
};

// Sum of number(k) over the inner elements, added by halves.
template <class Number>
PENSTOCK_INLINE Vec sum_of_group(const Number& number) {
  static_assert(kGroup == 32);
  Vec sums[4];
  for (int k = 0; k < 4; ++k) {
    const Vec first = (number(k) + number(k + 16)) + (number(k + 8) + number(k + 24));
    const Vec second = (number(k + 4) + number(k + 20)) + (number(k + 12) + number(k + 28));
    sums[k] = first + second;
  }
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// Squared error of the weights that a grid has integers for.
PENSTOCK_INLINE Vec squared_error(const Vec* group, const Grid& grid) {
  return Rounding<0, 15>(grid.scale, grid.minimum).with([&](auto round) PENSTOCK_ALWAYS {
    return sum_of_group([&](int k) PENSTOCK_ALWAYS {
      const Vec error = rounded_product(round(group[k]), grid.scale) + grid.minimum - group[k];
      return rounded_product(error, error);
    });
  });
}

// Least-squares scale and minimum for the integers of a grid. mean: of the group. integers: scratch memory.
PENSTOCK_INLINE Grid fitted(const Vec* group, Vec mean, const Grid& grid, Vec* integers) {
  struct Sums {
    Vec of_integers, of_squares;  // exact in any order
  };
  const Sums sums = Rounding<0, 15>(grid.scale, grid.minimum).with([&](auto round) PENSTOCK_ALWAYS {
    Sums some{};
#pragma GCC unroll 4
    for (int k = 0; k < kGroup; ++k) {
      integers[k] = round(group[k]);
      some.of_integers += integers[k];
      some.of_squares += integers[k] * integers[k];
    }
    return some;
  });
  const Vec centre = sums.of_integers / static_cast<float>(kGroup);
  const Vec variance = sums.of_squares - sums.of_integers * centre;
  const Vec covariance =
      sum_of_group([&](int k) PENSTOCK_ALWAYS { return rounded_product(integers[k] - centre, group[k]); });
  const Vec scale = variance == Vec{} ? grid.scale : covariance / (variance == Vec{} ? splat(1.0f) : variance);
  return {scale, mean - rounded_product(scale, centre)};
}

// The grid with the least squared error: of several ranges, each fitted to its integers. The minimum of a group with an
// element that is not finite is not finite. integers: scratch memory.
static __attribute__((noinline)) Grid best_grid(const Vec* group, Vec* integers) {
  Vec low = group[0], high = group[0];
  for (int k = 1; k < kGroup; ++k) {
    low = min(group[k], low);
    high = max(group[k], high);
  }
  low += 0.0f;  // no negative zeros
  high += 0.0f;
  const Vec mean = sum_of_group([&](int k) { return group[k]; }) / static_cast<float>(kGroup);
  Grid best{(high - low) / 15.0f, low};
  Vec smallest = squared_error(group, best);
  const Vec middle = (high + low) / 2.0f, half = (high - low) / 2.0f;
  constexpr double kShares[] = {1.0, 0.9, 0.8};
  for (const double share : kShares) {
    const Grid range{half * static_cast<float>(2 * share / 15),
                     middle - rounded_product(half, splat(static_cast<float>(share)))};
    const Grid grid = fitted(group, mean, range, integers);
    const Vec error = squared_error(group, grid);
    const IntVec is_better = error < smallest;
    smallest = is_better ? error : smallest;
    best.scale = is_better ? grid.scale : best.scale;
    best.minimum = is_better ? grid.minimum : best.minimum;
  }
  // Elements that are not finite may hide behind comparisons, but not in their mean.
  best.minimum = mean - mean == Vec{} ? best.minimum : mean;
  return best;
}

// Rounds a group of a panel's vector to int4, and leaves the quantisation errors in its place.
static __attribute__((noinline)) void round_group(const Int4Format&, Vec* group, const Inside& inside, uint8_t* head,
                                                  uint8_t* run, IntVec& failed) {
  Vec integers[kGroup];
  const Grid grid = best_grid(group, integers);
  const Vec scale = store_narrow(head, grid.scale, failed);
  const Vec minimum = store_narrow(head + kPanel * sizeof(Float16), grid.minimum, failed);
  round_on_grid<0, 15>(group, scale, minimum, integers);
  for (int pair = 0; pair < kGroupUnits / 2; ++pair) {
    const Vec* const of = integers + 8 * pair;
    const UintVec kept = inside.of_unit(2 * pair) & 0x0f0f0f0f, above = inside.of_unit(2 * pair + 1) & 0xf0f0f0f0u;
    const auto both_of = [&](int i) PENSTOCK_ALWAYS { return of[i] + of[i + 4] * 16.0f; };
    const UintVec both = joined(both_of(0), both_of(1), both_of(2), both_of(3)) & (kept | above);
    std::memcpy(run + pair * kPanelVectors * sizeof both, &both, sizeof both);
  }
  for (int k = 0; k < kGroup; ++k) group[k] -= rounded_product(integers[k], scale) + minimum;
}

struct QuantizedRoundJob {
  const QuantizedRoundArgs* args;
  int64_t next_panel;
  int failed;
};

template <class Format, class W>
static void round_panel(QuantizedRoundJob& job, int64_t panel) {
  const QuantizedRoundArgs& a = *job.args;
  const QuantizedShape& s = a.shape;
  const int64_t offset = panel * panel_bytes(s), groups = num_groups(s);
  uint8_t* const outs[] = {static_cast<uint8_t*>(a.packed) + offset, static_cast<uint8_t*>(a.rest) + offset};
  const int num_outs = a.rest == nullptr ? 1 : 2;
  IntVec failed{};
  for (int v = 0; v < kPanelVectors; ++v) {
    const int64_t first = panel * kPanel + v * kLanes, outputs = s.out_features - first;
    const W* const rows = static_cast<const W*>(a.weight) + first * a.weight_stride;
    Inside inside{};
    for (int i = 0; i < kLanes; ++i) inside.outputs[i] = i < outputs ? ~0u : 0u;
    for (int64_t g = 0; g < groups; ++g) {
      Vec group[kGroup];
      inside.inputs = least(kGroup, s.in_features - g * kGroup);
      load_group(rows + g * kGroup, a.weight_stride, outputs, inside.inputs, group);
      for (int i = 0; i < num_outs; ++i) {
        uint8_t* const head = outs[i] + g * group_bytes(s);
        round_group(Format{}, group, inside, head + v * kLanes * sizeof(Float16),
                    head + head_bytes(s) + v * sizeof(UintVec), failed);
      }
    }
  }
  const int64_t used = groups * group_bytes(s);
  for (int i = 0; i < num_outs; ++i) std::memset(outs[i] + used, 0, panel_bytes(s) - used);
  if (any(failed)) __atomic_store_n(&job.failed, 1, __ATOMIC_RELAXED);
}

template <class Format, class W>
static void round_thread(void* data, int, const Team&) {
  auto& job = *static_cast<QuantizedRoundJob*>(data);
  const int64_t panels = num_panels(job.args->shape);
  for (;;) {
    const int64_t panel = __atomic_fetch_add(&job.next_panel, 1, __ATOMIC_RELAXED);
    if (panel >= panels) return;
    round_panel<Format, W>(job, panel);
  }
}

// Elements for which another thread pays.
constexpr int64_t kRoundedPerThread = 16 * 1024;

static bool round_weight(const QuantizedRoundArgs& a) {
  QuantizedRoundJob job{&a, 0, 0};
  const int64_t most = 1 + a.shape.out_features * a.shape.in_features / kRoundedPerThread;
  const int num_threads = static_cast<int>(least(a.num_threads, most));
  const auto round_as = [&](auto format) {
    using Format = decltype(format);
    switch (a.weight_type) {
      case WeightType::kBfloat16: return run_parallel(num_threads, round_thread<Format, Bfloat16>, &job);
      case WeightType::kFloat16: return run_parallel(num_threads, round_thread<Format, Float16>, &job);
      default: return run_parallel(num_threads, round_thread<Format, float>, &job);
    }
  };
  a.shape.bits == 8 ? round_as(ByteFormat<false>{}) : round_as(Int4Format{});
  return job.failed == 0;
}

}  // namespace PENSTOCK_NAMESPACE

#undef PENSTOCK_ALWAYS
