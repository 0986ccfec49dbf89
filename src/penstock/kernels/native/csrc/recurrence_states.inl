// Pages of a step's recurrent states, causal convolution, and gated norms.

namespace PENSTOCK_NAMESPACE {

// Most tokens that are prepared and advanced together.
constexpr int64_t kSegment = 64;

// Tokens of a request that end at a state which goes to a page. from: the state before them, nullptr at the beginning
// of a request. copy: a second page; nullptr for none. is_kept: false where the page only holds a state on the way.
struct StateSegment {
  int64_t begin, end;
  const char* from;
  char* to;
  char* copy;
  bool is_kept;
};

// StateSegments of a request's tokens, in order.
class StateSegments {
 public:
  StateSegments(const StatePages& pages, int64_t request)
      : pages_(pages),
        table_(pages.block_table + request * pages.block_table_stride),
        next_(pages.query_start[request]),
        end_(pages.query_start[request + 1]),
        length_(pages.seq_lens[request]) {
    const int64_t first = position(next_);
    if (first <= 0 || next_ >= end_) return;
    const int32_t snapshot = first % pages.block_size == 0 ? snapshot_before(first) : 0;
    const int32_t block = snapshot > 0 ? snapshot : table_[(first - 1) % pages.num_own_blocks];
    if (block > 0) before_ = page(block);
  }

  bool next(StateSegment& s) {
    if (next_ >= end_) return false;
    s.begin = next_;
    s.end = stop();
    s.from = before_;
    const int64_t length = position(s.end), kept_from = length_ - pages_.num_own_blocks;
    const int32_t snapshot = length % pages_.block_size == 0 ? snapshot_before(length) : 0;
    char* shared = snapshot > 0 ? page(snapshot) : nullptr;
    const bool is_own = length > kept_from;
    s.is_kept = is_own || shared != nullptr;
    // A state on the way lies where that of the last token will.
    s.to = !is_own && shared != nullptr ? shared : page(table_[((is_own ? length : length_) - 1) % pages_.num_own_blocks]);
    s.copy = is_own ? shared : nullptr;
    next_ = s.end;
    before_ = s.to;
    return true;
  }

 private:
  // Position of a token of the step.
  int64_t position(int64_t token) const { return length_ - (end_ - token); }
  char* page(int32_t block) const { return pages_.pages + block * pages_.page_stride; }
  // Block of the state after `length` positions, of which there are whole blocks.
  int32_t snapshot_before(int64_t length) const {
    return table_[pages_.num_own_blocks + length / pages_.block_size - 1];
  }

  // End of the segment that begins at next_.
  int64_t stop() const {
    const int64_t first_kept = end_ - pages_.num_own_blocks;
    if (next_ >= first_kept) return next_ + 1;
    int64_t stop = next_ + kSegment < first_kept + 1 ? next_ + kSegment : first_kept + 1;
    const int64_t size = pages_.block_size, begin = position(next_);
    for (int64_t border = begin / size * size + size; border - begin < stop - next_; border += size)
      if (snapshot_before(border) > 0) return next_ + border - begin;
    return stop;
  }

  const StatePages& pages_;
  const int32_t* table_;
  int64_t next_, end_, length_;
  const char* before_ = nullptr;
};

PENSTOCK_INLINE Vec load(const Bfloat16* from) { return widen(from); }

// The first `count` elements, and zeros; all where there are more.
template <class T>
PENSTOCK_INLINE Vec load_first(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T lanes[kLanes] = {};
  std::memcpy(lanes, from, count * sizeof(T));
  return load(lanes);
}

PENSTOCK_INLINE void store(Bfloat16* to, Vec v) {
  const HalfVec halves = __builtin_convertvector(round_to_bfloat16(v) >> 16, HalfVec);
  std::memcpy(to, &halves, sizeof halves);
}

// Stores past the caches: without reading the line first, and without evicting others. At aligned addresses.
PENSTOCK_INLINE void stream(float* to, Vec v) {
#if defined(__x86_64__) && PENSTOCK_LANES == 16
  _mm512_stream_ps(to, (__m512)v);
#elif defined(__x86_64__) && PENSTOCK_LANES == 8
  _mm256_stream_ps(to, (__m256)v);
#elif defined(__x86_64__)
  _mm_stream_ps(to, (__m128)v);
#else
  store(to, v);
#endif
}
PENSTOCK_INLINE void stream(Bfloat16* to, Vec v) {
#if defined(__x86_64__) && PENSTOCK_LANES == 16
  const HalfVec halves = __builtin_convertvector(round_to_bfloat16(v) >> 16, HalfVec);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)halves);
#elif defined(__x86_64__) && PENSTOCK_LANES == 8
  const HalfVec halves = __builtin_convertvector(round_to_bfloat16(v) >> 16, HalfVec);
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)halves);
#else
  store(to, v);
#endif
}
// Lets other threads see streamed values that they are told of from here on.
PENSTOCK_INLINE void order_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <class T>
PENSTOCK_INLINE void store_first(T* to, Vec v, int64_t count) {
  if (count >= kLanes) return store(to, v);
  T lanes[kLanes];
  store(lanes, v);
  std::memcpy(to, lanes, count * sizeof(T));
}

// The value that a state of this type keeps.
PENSTOCK_INLINE Vec kept_as(const float*, Vec v) { return v; }
PENSTOCK_INLINE Vec kept_as(const Bfloat16*, Vec v) { return (Vec)round_to_bfloat16(v); }

PENSTOCK_INLINE Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

PENSTOCK_INLINE Vec activated(GateActivation activation, Vec x) {
  return activation == GateActivation::kSilu ? Silu::of(x) : activation == GateActivation::kSigmoid ? sigmoid(x) : x;
}

// Channels that go through a segment together.
constexpr int64_t kChannels = 64;

// A unit of work is a range of channels, in all tokens of a request.
struct ConvolutionJob {
  const ConvolutionArgs* args;
  int64_t channels, ranges, next_unit;
};

// Inputs of a segment's tokens, behind those of the tokens before it.
struct ConvolutionInputs {
  alignas(64) float rows[kMostTaps - 1 + kSegment][kChannels];
};

template <class S>
static void convolve_channels(const ConvolutionArgs& a, int64_t request, int64_t first, int64_t width,
                              ConvolutionInputs& inputs) {
  const int64_t before = a.taps - 1;
  StateSegments segments(a.states, request);
  bool has_begun = false;
  for (StateSegment s; segments.next(s);) {
    if (!has_begun) {
      const S* page = reinterpret_cast<const S*>(s.from);
      for (int64_t k = 0; k < before; ++k)
        for (int64_t c = 0; c < width; c += kLanes)
          store(inputs.rows[k] + c, page == nullptr ? Vec{} : load_first(page + k * a.channels + first + c, width - c));
      has_begun = true;
    }
    const int64_t count = s.end - s.begin;
    for (int64_t t = 0; t < count; ++t) {
      const float* x = a.x + (s.begin + t) * a.x_stride + first;
      for (int64_t c = 0; c < width; c += kLanes) {
        Vec input = load_first(x + a.offset + c, width - c);
        if (a.gate_before >= 0) input = input * load_first(x + a.gate_before + c, width - c);
        store(inputs.rows[before + t] + c, kept_as(static_cast<const S*>(nullptr), input));
      }
    }
    for (int64_t c = 0; c < width; c += kLanes) {
      Vec taps[kMostTaps];
      for (int64_t k = 0; k < a.taps; ++k) taps[k] = load_first(a.weight + k * a.channels + first + c, width - c);
      const Vec bias = a.bias == nullptr ? Vec{} : load_first(a.bias + first + c, width - c);
      for (int64_t t = 0; t < count; ++t) {
        Vec sum = bias;
        for (int64_t k = 0; k < a.taps; ++k) multiply_add(sum, load(inputs.rows[t + k] + c), taps[k]);
        sum = activated(a.activation, sum);
        const int64_t token = s.begin + t;
        if (a.gate_after >= 0) sum = sum * load_first(a.x + token * a.x_stride + a.gate_after + first + c, width - c);
        store_first(a.out + token * a.out_stride + first + c, sum, width - c);
      }
    }
    char* const pages[] = {s.is_kept ? s.to : nullptr, s.copy};
    for (char* page : pages)
      for (int64_t k = 0; page != nullptr && k < before; ++k)
        for (int64_t c = 0; c < width; c += kLanes)
          store_first(reinterpret_cast<S*>(page) + k * a.channels + first + c, load(inputs.rows[count + k] + c), width - c);
    std::memmove(inputs.rows[0], inputs.rows[count], before * sizeof inputs.rows[0]);
  }
}

static void convolve_thread(void* data, int, const Team&) {
  auto& job = *static_cast<ConvolutionJob*>(data);
  const ConvolutionArgs& a = *job.args;
  ConvolutionInputs inputs;
  for (;;) {
    const int64_t unit = __atomic_sub_fetch(&job.next_unit, 1, __ATOMIC_RELAXED);
    if (unit < 0) return;
    const int64_t first = unit % job.ranges * job.channels, end = least(first + job.channels, a.channels);
    for (int64_t at = first; at < end; at += kChannels)
      (a.state_type == StateType::kBfloat16 ? convolve_channels<Bfloat16> : convolve_channels<float>)(
          a, unit / job.ranges, at, least(end - at, kChannels), inputs);
  }
}

static void convolve(const ConvolutionArgs& a) {
  const int64_t num_requests = a.states.num_requests;
  ConvolutionJob job{&a, a.channels, 1, 0};
  // Few long ranges: the rows of a state are read faster from one end to the other.
  while (num_requests * job.ranges < kUnitsPerThread * a.num_threads && job.channels > kChannels) {
    job.channels = divided_up(job.channels, 2 * kChannels) * kChannels;
    job.ranges = divided_up(a.channels, job.channels);
  }
  job.next_unit = num_requests * job.ranges;
  const int64_t elements = a.states.query_start[num_requests] * a.channels * 4;
  run_parallel(threads_for(elements, job.next_unit, a.num_threads), convolve_thread, &job);
}

static void gated_norm_thread(void* data, int thread, const Team& team) {
  const auto& a = *static_cast<const GatedNormArgs*>(data);
  const int64_t begin = a.rows * thread / team.num_threads, end = a.rows * (thread + 1) / team.num_threads;
  const int64_t size = a.weight == nullptr ? a.size : a.group_size;
  const bool gates_first = a.gates_first || a.weight == nullptr;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t first = 0; first < a.size; first += size) {
      const float* x = a.x + row * a.x_stride + first;
      const float* gate = a.gate + row * a.gate_stride + a.offset + first;
      float* out = a.out + row * a.size + first;
      const auto gate_at = [&](int64_t i) { return activated(a.activation, load_first(gate + i, size - i) * a.gate_scale); };
      Vec squares = {};
      for (int64_t i = 0; i < size; i += kLanes) {
        Vec v = load_first(x + i, size - i);
        if (gates_first) v = v * gate_at(i);
        store_first(out + i, v, size - i);
        multiply_add(squares, v, v);
      }
      if (a.weight == nullptr) continue;
      const float* weight = a.weight + first / size * a.weight_stride;
      const float scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(size) + a.eps);
      for (int64_t i = 0; i < size; i += kLanes) {
        Vec v = load_first(out + i, size - i) * scale * load_first(weight + i, size - i);
        if (!gates_first) v = v * gate_at(i);
        store_first(out + i, v, size - i);
      }
    }
}

static void gated_norm(const GatedNormArgs& a) {
  GatedNormArgs args = a;
  run_parallel(threads_for(a.rows * a.size * 4, a.rows, a.num_threads), gated_norm_thread, &args);
}

}  // namespace PENSTOCK_NAMESPACE
