// Linear recurrences of recurrent layers: state-space models, the gated delta rule, lightning attention.
//
// A state of a head is [key_size][value_size], with value channels in the lanes of vectors: so no sum crosses lanes, and
// every element is computed by the same operations in the same order, whatever else is computed beside it. Sums over
// keys are added from the first one to the last.

namespace PENSTOCK_NAMESPACE {

// Vectors of value channels that go through several tokens together, and through one token.
constexpr int kVectorsOfMany = 2, kVectorsOfOne = 4;
// Tokens that a part of a state goes through while it is in registers.
constexpr int kTokensAtOnce = kLanes == 16 ? 4 : 2;
constexpr float kUnitEps = 1e-6f;

// A head in the tokens of a segment: rows of the step from its first token on, and numbers of each token.
struct HeadTokens {
  int64_t count, row_stride, out_stride;
  const float *values, *keys, *queries, *gates;  // of the head, but gates of all
  int64_t key_row_stride, query_row_stride, gates_stride;
  bool begins;  // with the first token of a request
  // Pages of the states after each token if has_each, else after the last one alone: of all heads, and second ones or
  // nullptr. streams: whether the pages are written past the caches.
  char *pages[kSegment], *copies[kSegment];
  bool has_each, streams;
  float* out;
  float *steps, *decays, *added, *memory, *out_scales;  // [count]
  float *key_decays, *decayed_keys;                     // [count][key_stride], with steps per key
  int64_t key_stride;
  float decay_rate;
};

// log(1 + e^x), by the series of the inverse hyperbolic tangent.
PENSTOCK_INLINE Vec softplus(Vec x) {
  const Vec e = exp(min(x, -x)), z = e / (e + 2.0f), square = z * z;
  Vec p = splat(1.0f / 17.0f);
  p = p * square + 1.0f / 15.0f;
  p = p * square + 1.0f / 13.0f;
  p = p * square + 1.0f / 11.0f;
  p = p * square + 1.0f / 9.0f;
  p = p * square + 1.0f / 7.0f;
  p = p * square + 1.0f / 5.0f;
  p = p * square + 1.0f / 3.0f;
  p = p * square + 1.0f;
  return max(splat(0.0f), x) + z * p * 2.0f;
}

// Steps from the gates of one head, key channel or value channel.
static __attribute__((noinline)) Vec steps_of(const RecurrenceArgs& a, Vec gates, Vec bias) {
  const Vec x = gates * a.step_scale + bias;
  const Vec steps = a.step_activation == StepActivation::kSigmoid ? sigmoid(x) : softplus(x);
  return min(splat(a.max_step), max(splat(a.min_step), steps));
}

// sqrt(1 - decay^2): with it a state of inputs of variance 1 has variance 1.
PENSTOCK_INLINE Vec variance_left(Vec decay) {
  Vec left = splat(1.0f);
  multiply_add(left, -decay, decay);
  for (int lane = 0; lane < kLanes; ++lane) left[lane] = __builtin_sqrtf(left[lane]);
  return left;
}

PENSTOCK_INLINE float sum_of_squares(const float* x, int64_t size) {
  Vec squares = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec v = load_first(x + i, size - i);
    multiply_add(squares, v, v);
  }
  return sum_lanes(squares);
}

// The numbers of a head's tokens.
static __attribute__((noinline)) void prepare(const RecurrenceArgs& a, int64_t head, HeadTokens& h) {
  const bool has_steps = a.steps >= 0, by_head = a.step_size == StepSize::kHead;
  const Vec rate = splat(-h.decay_rate);
  for (int64_t t = 0; t < h.count; ++t) {
    h.steps[t] = has_steps && by_head ? h.gates[t * h.gates_stride + a.steps + head] : 0.0f;
    h.added[t] = a.betas >= 0 ? h.gates[t * h.gates_stride + a.betas + head] : 0.0f;
  }
  const Vec bias = splat(by_head && a.step_bias != nullptr ? a.step_bias[head] : 0.0f);
  for (int64_t t = 0; t < h.count; t += kLanes) {
    const Vec steps = has_steps && by_head ? steps_of(a, load(h.steps + t), bias) : splat(1.0f);
    store(h.steps + t, steps);
    store(h.decays + t, exp(steps * rate));
    const Vec scales = a.scales_values ? steps : splat(1.0f);
    store(h.added + t, a.betas >= 0 ? sigmoid(load(h.added + t)) * a.beta_scale : scales);
  }
  for (int64_t t = 0; t < h.count; ++t) {
    const float *key = h.keys + t * h.row_stride, *query = h.queries + t * h.row_stride;
    float of_key = 1.0f, of_query = a.query_scale;
    if (a.has_unit_keys) {
      of_key = 1.0f / __builtin_sqrtf(sum_of_squares(key, a.key_size) + kUnitEps);
      of_query = a.query_scale / __builtin_sqrtf(sum_of_squares(query, a.key_size) + kUnitEps);
    }
    h.added[t] *= of_key;
    h.out_scales[t] = of_query;
    h.memory[t] = a.step_size == StepSize::kKey ? -of_key : -of_key * h.decays[t];
    if (a.step_size != StepSize::kKey) continue;
    const float* gates = h.gates + t * h.gates_stride + a.steps + head * a.key_size;
    for (int64_t n = 0; n < a.key_size; n += kLanes) {
      const int64_t left = a.key_size - n;
      const Vec bias = a.step_bias == nullptr ? Vec{} : load_first(a.step_bias + head * a.key_size + n, left);
      const Vec decays = exp(steps_of(a, load_first(gates + n, left), bias) * rate);
      store(h.key_decays + t * h.key_stride + n, decays);
      store(h.decayed_keys + t * h.key_stride + n, decays * load_first(key + n, left));
    }
  }
}

// Rows of a head's state, or of its part in registers' reach. stride: elements; 0 for rows of zeros.
template <class S>
struct StateRows {
  S* at;
  int64_t stride;
};

#define PENSTOCK_METHOD inline __attribute__((always_inline))

// Value channels of a head: from `first` on, kVectors vectors, of which the last has `count` elements in part.
template <class S, int kVectors, bool kIsPart>
struct Channels {
  const RecurrenceArgs& a;
  const HeadTokens& h;
  int64_t head, first, count;

  PENSTOCK_METHOD Vec load_some(const S* from) const { return kIsPart ? load_first(from, count) : load(from); }
  PENSTOCK_METHOD void store_some(S* to, Vec v) const { kIsPart ? store_first(to, v, count) : store(to, v); }
  PENSTOCK_METHOD void store_to_page(S* to, Vec v) const {
    if (!kIsPart && h.streams) stream(to, v);
    else store_some(to, v);
  }

  // Rows of the state after token t in its page; nullptr where it has none.
  PENSTOCK_METHOD StateRows<S> page(int64_t t) const {
    if (!h.has_each && t + 1 < h.count) return {nullptr, 0};
    return {reinterpret_cast<S*>(h.pages[t]) + head * a.key_size * a.value_size + first, a.value_size};
  }

  PENSTOCK_METHOD Vec value(int64_t t, int v) const {
    const float* at = h.values + t * h.row_stride + first + v * kLanes;
    return kIsPart ? load_first(at, count) : load(at);
  }

  // Stores the sums over keys as outputs.
  PENSTOCK_METHOD void put(int64_t t, const Vec* sums) const {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = first + v * kLanes;
      Vec out = sums[v] * splat(h.out_scales[t]);
      if (a.skip != nullptr) {
        const float* skip = a.skip + (a.skips_by_value ? head * a.value_size + at : head);
        multiply_add(out, a.skips_by_value ? load_first(skip, kIsPart ? count : kLanes) : splat(*skip), value(t, v));
      }
      float* to = h.out + t * h.out_stride + at;
      kIsPart ? store_first(to, out, count) : store(to, out);
    }
  }

  template <bool kByKey>
  PENSTOCK_METHOD Vec decay(int64_t t, int64_t n) const {
    return splat(kByKey ? h.key_decays[t * h.key_stride + n] : h.decays[t]);
  }

  // kTokens tokens from t on, without the delta rule.
  template <int kTokens, bool kByKey>
  void add_tokens(int64_t t, StateRows<const S> from, StateRows<S> between) const {
    const bool has_next = t + kTokens < h.count;
    StateRows<S> pages[kTokens];
    for (int i = 0; i < kTokens; ++i) pages[i] = page(t + i);
    Vec sums[kTokens][kVectors] = {}, added[kTokens][kVectors];
    for (int i = 0; i < kTokens; ++i)
      for (int v = 0; v < kVectors; ++v) added[i][v] = value(t + i, v) * splat(h.added[t + i]);
    const float *keys = h.keys + t * h.row_stride, *queries = h.queries + t * h.row_stride;
    for (int64_t n = 0; n < a.key_size; ++n, from.at += from.stride) {
      Vec state[kVectors];
      for (int v = 0; v < kVectors; ++v) state[v] = load_some(from.at + v * kLanes);
      for (int i = 0; i < kTokens; ++i) {
        const Vec key = splat(keys[i * h.row_stride + n]), query = splat(queries[i * h.row_stride + n]);
        const Vec of_token = decay<kByKey>(t + i, n);
        for (int v = 0; v < kVectors; ++v) {
          Vec next = added[i][v] * key;
          multiply_add(next, state[v], of_token);
          multiply_add(sums[i][v], next, query);
          state[v] = kept_as(static_cast<const S*>(nullptr), next);
        }
        if (pages[i].at == nullptr) continue;
        for (int v = 0; v < kVectors; ++v) store_to_page(pages[i].at + n * pages[i].stride + v * kLanes, state[v]);
      }
      if (!has_next) continue;
      for (int v = 0; v < kVectors; ++v) store_some(between.at + n * between.stride + v * kLanes, state[v]);
    }
    for (int i = 0; i < kTokens; ++i) put(t + i, sums[i]);
  }

  // Sums over keys of a decayed state that token t replaces; without the factor `memory`.
  template <bool kByKey>
  void remember(int64_t t, StateRows<const S> from, Vec* memory) const {
    const float* keys = kByKey ? h.decayed_keys + t * h.key_stride : h.keys + t * h.row_stride;
    for (int v = 0; v < kVectors; ++v) memory[v] = Vec{};
    for (int64_t n = 0; n < a.key_size; ++n, from.at += from.stride)
      for (int v = 0; v < kVectors; ++v) multiply_add(memory[v], load_some(from.at + v * kLanes), splat(keys[n]));
  }

  // Token t by the delta rule. memory: of this token; becomes that of the next one, if there is one.
  template <bool kByKey, bool kHasNext>
  void replace(int64_t t, StateRows<const S> from, StateRows<S> between, Vec* memory) const {
    const StateRows<S> page = this->page(t);
    Vec sums[kVectors] = {}, added[kVectors], next_memory[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) {
      added[v] = value(t, v);
      multiply_add(added[v], memory[v], splat(h.memory[t]));
      added[v] = added[v] * splat(h.added[t]);
    }
    const float *keys = h.keys + t * h.row_stride, *queries = h.queries + t * h.row_stride;
    const float* next_keys = kByKey ? h.decayed_keys + (t + 1) * h.key_stride : keys + h.row_stride;
    for (int64_t n = 0; n < a.key_size; ++n, from.at += from.stride) {
      const Vec key = splat(keys[n]), query = splat(queries[n]), of_token = decay<kByKey>(t, n);
      for (int v = 0; v < kVectors; ++v) {
        Vec next = added[v] * key;
        multiply_add(next, load_some(from.at + v * kLanes), of_token);
        multiply_add(sums[v], next, query);
        next = kept_as(static_cast<const S*>(nullptr), next);
        if (kHasNext) {
          multiply_add(next_memory[v], next, splat(next_keys[n]));
          store_some(between.at + n * between.stride + v * kLanes, next);
        }
        if (page.at != nullptr) store_to_page(page.at + n * page.stride + v * kLanes, next);
      }
    }
    for (int v = 0; v < kVectors; ++v) memory[v] = next_memory[v];
    put(t, sums);
  }

  // Token t with a decay for each element of the state. rates: [key_size][kVectors * kLanes], of powers of two: a power
  // per element and token is most of the time.
  void add_by_element(int64_t t, StateRows<const S> from, StateRows<S> between, const float* rates) const {
    const bool has_next = t + 1 < h.count;
    const StateRows<S> page = this->page(t);
    Vec sums[kVectors] = {}, added[kVectors], steps[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = head * a.value_size + first + v * kLanes, left = kIsPart ? count : kLanes;
      steps[v] = splat(h.steps[t]);
      added[v] = value(t, v) * splat(h.added[t]);
      if (a.step_size == StepSize::kValue) {
        const Vec bias = a.step_bias == nullptr ? Vec{} : load_first(a.step_bias + at, left);
        steps[v] = steps_of(a, load_first(h.gates + t * h.gates_stride + a.steps + at, left), bias);
        if (a.scales_values) added[v] = added[v] * steps[v];
      }
    }
    const float *keys = h.keys + t * h.key_row_stride, *queries = h.queries + t * h.query_row_stride;
    const bool scales = a.keeps_variance && !(h.begins && t == 0);
    for (int64_t n = 0; n < a.key_size; ++n, from.at += from.stride, rates += kVectors * kLanes) {
      const Vec key = splat(keys[n]), query = splat(queries[n]);
      for (int v = 0; v < kVectors; ++v) {
        const Vec of_element = exp2_of_negative(steps[v] * load(rates + v * kLanes));
        Vec next = added[v] * key;
        if (scales) next = next * variance_left(of_element);
        multiply_add(next, load_some(from.at + v * kLanes), of_element);
        multiply_add(sums[v], next, query);
        if (has_next) store_some(between.at + n * between.stride + v * kLanes, next);
        if (page.at != nullptr) store_to_page(page.at + n * page.stride + v * kLanes, next);
      }
    }
    put(t, sums);
  }

  void decay_rates(float* rates) const {
    for (int64_t n = 0; n < a.key_size; ++n)
      for (int v = 0; v < kVectors; ++v) {
        const float* log = a.decay_log + (head * a.key_size + n) * a.value_size + first + v * kLanes;
        const Vec rate = a.decays_by_element ? exp(load_first(log, kIsPart ? count : kLanes)) : splat(h.decay_rate);
        store(rates + (n * kVectors + v) * kLanes, rate * -kLog2e);
      }
  }

  // All tokens of the segment: from a state to those of the pages, by way of `between`.
  template <bool kByKey>
  void advance(StateRows<const S> from, StateRows<S> between) const {
    if (a.betas < 0) {
      for (int64_t t = 0; t < h.count;) {
        const bool many = kVectors <= kVectorsOfMany && h.count - t >= kTokensAtOnce;
        if constexpr (kVectors <= kVectorsOfMany) {
          if (many) add_tokens<kTokensAtOnce, kByKey>(t, from, between);
        }
        if (!many) add_tokens<1, kByKey>(t, from, between);
        from = {between.at, between.stride};
        t += many ? kTokensAtOnce : 1;
      }
      return;
    }
    Vec memory[kVectors];
    remember<kByKey>(0, from, memory);
    for (int64_t t = 0; t + 1 < h.count; ++t) {
      replace<kByKey, true>(t, from, between, memory);
      from = {between.at, between.stride};
    }
    replace<kByKey, false>(h.count - 1, from, between, memory);
  }

  void advance(StateRows<const S> from, S* memory, float* rates) const {
    const StateRows<S> between{memory, kVectors * kLanes};
    if (a.step_size == StepSize::kKey) return advance<true>(from, between);
    if (a.step_size == StepSize::kHead && !a.decays_by_element) return advance<false>(from, between);
    decay_rates(rates);
    for (int64_t t = 0; t < h.count; ++t) {
      add_by_element(t, from, between, rates);
      from = {between.at, between.stride};
    }
  }
};

// Memory of a thread.
struct RecurrenceMemory {
  float *between, *rates, *zeros;
};

// Value channels from `first` to `end` of a head through a segment's tokens. before: page of the state; nullptr for zeros.
template <class S>
static void advance_head(const RecurrenceArgs& a, const HeadTokens& h, const char* before, int64_t head, int64_t first,
                         int64_t end, const RecurrenceMemory& memory) {
  const int64_t size = a.value_size, offset = head * a.key_size * size;
  auto* between = reinterpret_cast<S*>(memory.between);
  for (int64_t at = first; at < end;) {
    StateRows<const S> from{reinterpret_cast<const S*>(memory.zeros), 0};
    if (before != nullptr) from = {reinterpret_cast<const S*>(before) + offset + at, size};
    const int64_t left = end - at;
    if (h.count == 1 && left >= kVectorsOfOne * kLanes) {
      Channels<S, kVectorsOfOne, false>{a, h, head, at, 0}.advance(from, between, memory.rates);
      at += kVectorsOfOne * kLanes;
    } else if (left >= kVectorsOfMany * kLanes) {
      Channels<S, kVectorsOfMany, false>{a, h, head, at, 0}.advance(from, between, memory.rates);
      at += kVectorsOfMany * kLanes;
    } else if (left >= kLanes) {
      Channels<S, 1, false>{a, h, head, at, 0}.advance(from, between, memory.rates);
      at += kLanes;
    } else {
      Channels<S, 1, true>{a, h, head, at, left}.advance(from, between, memory.rates);
      at = end;
    }
  }
  for (int64_t t = h.has_each ? 0 : h.count - 1; t < h.count; ++t) {
    if (h.copies[t] == nullptr) continue;
    const S* page = reinterpret_cast<const S*>(h.pages[t]) + offset;
    S* copy = reinterpret_cast<S*>(h.copies[t]) + offset;
    for (int64_t n = 0; n < a.key_size; ++n)
      std::memcpy(copy + n * size + first, page + n * size + first, (end - first) * sizeof(S));
  }
}

// Takes the next segment, or several of one token, which go through a part of the state together. next: the segment
// after the last one taken. Returns the page of the state before them.
static const char* take_segments(StateSegments& segments, StateSegment& next, bool& has_next, HeadTokens& h) {
  const char* const before = next.from;
  h.count = next.end - next.begin;
  h.has_each = h.count == 1;
  h.pages[h.count - 1] = next.to;
  h.copies[h.count - 1] = next.copy;
  has_next = segments.next(next);
  while (h.has_each && has_next && next.end - next.begin == 1 && h.count < kSegment) {
    h.pages[h.count] = next.to;
    h.copies[h.count++] = next.copy;
    has_next = segments.next(next);
  }
  return before;
}

// A unit of work is a range of a head's value channels, in all tokens of a request.
struct RecurrenceJob {
  const RecurrenceArgs* args;
  int64_t channels, ranges, next_unit;
  bool can_stream, has_failed;
};

// Whether pages are written past the caches: such stores need aligned addresses.
static bool can_stream(const RecurrenceArgs& a) {
  const int64_t size = a.state_type == StateType::kBfloat16 ? 2 : 4, vector = kLanes * size;
  const auto start = reinterpret_cast<uintptr_t>(a.states.pages);
  return start % vector == 0 && a.states.page_stride % vector == 0 && a.value_size % kLanes == 0;
}

static void recur_thread(void* data, int, const Team&) {
  auto& job = *static_cast<RecurrenceJob*>(data);
  const RecurrenceArgs& a = *job.args;
  static thread_local Scratch scratch;
  const int64_t key_stride = divided_up(a.key_size, kLanes) * kLanes, part = key_stride * kVectorsOfOne * kLanes;
  const int64_t by_key = a.step_size == StepSize::kKey ? kSegment * key_stride : 0;
  const int64_t of_all = 2 * part + kVectorsOfOne * kLanes + 5 * kSegment + 2 * by_key + key_stride;
  float* memory = scratch.get(static_cast<size_t>(of_all));
  if (memory == nullptr) return __atomic_store_n(&job.has_failed, true, __ATOMIC_RELAXED);
  const RecurrenceMemory of_thread{memory, memory + part, memory + 2 * part};
  std::memset(of_thread.zeros, 0, kVectorsOfOne * kLanes * sizeof(float));
  float* of_tokens = of_thread.zeros + kVectorsOfOne * kLanes;
  HeadTokens h{};
  h.row_stride = a.mixed_stride;
  h.key_row_stride = a.keys < 0 ? 0 : a.mixed_stride;
  h.query_row_stride = a.queries < 0 ? 0 : a.mixed_stride;
  h.gates_stride = a.gates_stride;
  h.out_stride = a.out_stride;
  h.key_stride = key_stride;
  float** const numbers[] = {&h.steps, &h.decays, &h.added, &h.memory, &h.out_scales};
  for (float** one : numbers) {
    *one = of_tokens;
    of_tokens += kSegment;
  }
  h.key_decays = of_tokens;
  h.decayed_keys = of_tokens + by_key;
  float* ones = h.decayed_keys + by_key;
  for (int64_t n = 0; n < key_stride; ++n) ones[n] = 1.0f;
  for (;;) {
    const int64_t unit = __atomic_sub_fetch(&job.next_unit, 1, __ATOMIC_RELAXED);
    if (unit < 0) break;
    const int64_t head = unit / job.ranges % a.num_heads, first = unit % job.ranges * job.channels;
    const int64_t end = first + job.channels < a.value_size ? first + job.channels : a.value_size;
    const int64_t group = head / (a.num_heads / a.num_groups);
    h.decay_rate = a.decays_by_element ? 0.0f : exp(splat(a.decay_log[head]))[0];
    StateSegments segments(a.states, unit / job.ranges / a.num_heads);
    StateSegment next;
    for (bool has_next = segments.next(next); has_next;) {
      const int64_t begin = next.begin;
      const char* const before = take_segments(segments, next, has_next, h);
      const float* mixed = a.mixed + begin * a.mixed_stride;
      h.streams = job.can_stream && h.has_each && h.count > 1;
      h.values = mixed + a.values + head * a.value_size;
      h.keys = a.keys < 0 ? ones : mixed + a.keys + group * a.key_size;
      h.queries = a.queries < 0 ? ones : mixed + a.queries + group * a.key_size;
      h.begins = before == nullptr;
      h.gates = a.gates + begin * a.gates_stride;
      h.out = a.out + begin * a.out_stride + head * a.value_size;
      prepare(a, head, h);
      (a.state_type == StateType::kBfloat16 ? advance_head<Bfloat16> : advance_head<float>)(a, h, before, head, first,
                                                                                            end, of_thread);
    }
  }
  order_streams();
}

static bool recur(const RecurrenceArgs& a) {
  RecurrenceJob job{&a, a.value_size, 1, 0, can_stream(a), false};
  const int64_t heads = a.states.num_requests * a.num_heads, wanted = kUnitsPerThread * a.num_threads;
  while (heads * job.ranges < wanted && job.channels > kVectorsOfMany * kLanes) {
    job.channels = divided_up(job.channels, 2 * kLanes) * kLanes;
    job.ranges = divided_up(a.value_size, job.channels);
  }
  job.next_unit = heads * job.ranges;
  const int64_t elements = a.states.query_start[a.states.num_requests] * a.num_heads * a.key_size * a.value_size;
  run_parallel(threads_for(elements, job.next_unit, a.num_threads), recur_thread, &job);
  return !job.has_failed;
}

}  // namespace PENSTOCK_NAMESPACE
