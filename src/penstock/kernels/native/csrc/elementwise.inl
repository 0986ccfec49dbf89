// Normalisation, activation and rotary embedding: one pass over the data each, rows shared among the threads.

namespace PENSTOCK_NAMESPACE {

// Elements below which waking other threads costs more than it saves.
constexpr int64_t kAlone = 16 * 1024;

PENSTOCK_INLINE int threads_for(int64_t elements, int64_t rows, int num_threads) {
  if (elements < kAlone || rows < 2) return 1;
  return num_threads;
}

PENSTOCK_INLINE void add(float* x, const float* y, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(x + i, load(x + i) + load(y + i));
  for (; i < size; ++i) x[i] += y[i];
}

PENSTOCK_INLINE void normalise(const float* x, const float* weight, float* out, int64_t size, float eps) {
  const int64_t whole = size / kLanes * kLanes;
  Vec squares = {};
  int64_t i = 0;
  for (; i < whole; i += kLanes) squares += load(x + i) * load(x + i);
  float sum = sum_lanes(squares);
  for (; i < size; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(size) + eps);
  for (i = 0; i < whole; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < size; ++i) out[i] = x[i] * scale * weight[i];
}

static void rms_norm_thread(void* data, int thread, const Team& team) {
  const auto& a = *static_cast<const NormArgs*>(data);
  const int64_t begin = a.rows * thread / team.num_threads, end = a.rows * (thread + 1) / team.num_threads;
  for (int64_t row = begin; row < end; ++row) {
    float* x = a.x + row * a.x_stride;
    if (a.residual != nullptr) add(x, a.residual + row * a.x_stride, a.heads * a.size);
    for (int64_t head = 0; head < a.heads; ++head)
      normalise(x + head * a.size, a.weight + head * a.weight_stride, a.out + (row * a.heads + head) * a.size, a.size,
                a.eps);
  }
}

static void rms_norm(const NormArgs& a) {
  NormArgs args = a;
  run_parallel(threads_for(a.rows * a.heads * a.size, a.rows, a.num_threads), rms_norm_thread, &args);
}

static void layer_norm_thread(void* data, int thread, const Team& team) {
  const auto& a = *static_cast<const LayerNormArgs*>(data);
  const int64_t begin = a.rows * thread / team.num_threads, end = a.rows * (thread + 1) / team.num_threads;
  const int64_t size = a.size, whole = size / kLanes * kLanes;
  for (int64_t row = begin; row < end; ++row) {
    float* x = a.x + row * a.x_stride;
    float* out = a.out + row * size;
    if (a.residual != nullptr) add(x, a.residual + row * a.x_stride, size);
    Vec sums = {};
    int64_t i = 0;
    for (; i < whole; i += kLanes) sums += load(x + i);
    float sum = sum_lanes(sums);
    for (; i < size; ++i) sum += x[i];
    const float mean = sum / static_cast<float>(size);
    Vec squares = {};
    for (i = 0; i < whole; i += kLanes) {
      const Vec d = load(x + i) - mean;
      squares += d * d;
    }
    float square = sum_lanes(squares);
    for (; i < size; ++i) square += (x[i] - mean) * (x[i] - mean);
    const float scale = 1.0f / __builtin_sqrtf(square / static_cast<float>(size) + a.eps);
    for (i = 0; i < whole; i += kLanes) {
      const Vec normed = (load(x + i) - mean) * scale * load(a.weight + i);
      store(out + i, a.bias == nullptr ? normed : normed + load(a.bias + i));
    }
    for (; i < size; ++i) out[i] = (x[i] - mean) * scale * a.weight[i] + (a.bias == nullptr ? 0.0f : a.bias[i]);
  }
}

static void layer_norm(const LayerNormArgs& a) {
  LayerNormArgs args = a;
  run_parallel(threads_for(a.rows * a.size, a.rows, a.num_threads), layer_norm_thread, &args);
}

struct Silu {
  PENSTOCK_INLINE Vec of(Vec x) { return x / (1.0f + exp(-x)); }
};

// x * (1 + tanh(u)) / 2 is x / (1 + e^-2u).
struct GeluTanh {
  PENSTOCK_INLINE Vec of(Vec x) {
    const Vec u = (x + x * x * x * 0.044715f) * 0.7978845608f;
    return x / (1.0f + exp(u * -2.0f));
  }
};

// erfc by Abramowitz and Stegun 7.1.26, within 1.5e-7.
struct Gelu {
  PENSTOCK_INLINE Vec of(Vec x) {
    const Vec u = max(x, -x) * 0.70710678118f;
    const Vec t = 1.0f / (1.0f + u * 0.3275911f);
    Vec p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const Vec tail = p * t * exp(-(u * u));  // erfc of u
    const IntVec is_negative = x < splat(0.0f);
    return x * 0.5f * (is_negative ? tail : 2.0f - tail);
  }
};

struct Relu {
  PENSTOCK_INLINE Vec of(Vec x) { return max(splat(0.0f), x); }
};

struct SquaredRelu {
  PENSTOCK_INLINE Vec of(Vec x) { return Relu::of(x) * Relu::of(x); }
};

template <class A>
static void activate_thread(void* data, int thread, const Team& team) {
  const auto& a = *static_cast<const ActivationArgs*>(data);
  const int64_t begin = a.rows * thread / team.num_threads, end = a.rows * (thread + 1) / team.num_threads;
  const int64_t whole = a.size / kLanes * kLanes, rest = a.size - whole;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = a.x + row * a.size;
    float* out = a.out + row * a.size;
    for (int64_t i = 0; i < whole; i += kLanes) store(out + i, A::of(load(x + i)));
    if (rest > 0) {
      float lanes[kLanes] = {};
      std::memcpy(lanes, x + whole, rest * sizeof(float));
      store(lanes, A::of(load(lanes)));
      std::memcpy(out + whole, lanes, rest * sizeof(float));
    }
  }
}

template <class Function>
static Function for_activation(Activation activation, Function silu, Function gelu_tanh, Function gelu, Function relu,
                               Function squared_relu) {
  return activation == Activation::kSilu          ? silu
         : activation == Activation::kGeluTanh    ? gelu_tanh
         : activation == Activation::kGelu        ? gelu
         : activation == Activation::kSquaredRelu ? squared_relu
                                                  : relu;
}

static void activate(const ActivationArgs& a) {
  ActivationArgs args = a;
  run_parallel(threads_for(a.rows * a.size * 4, a.rows, a.num_threads),
               for_activation(a.activation, activate_thread<Silu>, activate_thread<GeluTanh>, activate_thread<Gelu>,
                              activate_thread<Relu>, activate_thread<SquaredRelu>),
               &args);
}

template <class A>
struct Times {
  PENSTOCK_INLINE Vec of(Vec gate, Vec up, const GateArgs&) { return A::of(gate) * up; }
};

struct ClampedSwiglu {
  PENSTOCK_INLINE Vec of(Vec gate, Vec up, const GateArgs& a) {
    const Vec most = splat(a.limit), g = min(most, gate), u = min(most, max(-most, up));
    return g / (1.0f + exp(g * -a.alpha)) * (u + 1.0f);
  }
};

template <class G>
static void gate_and_mul_thread(void* data, int thread, const Team& team) {
  const auto& a = *static_cast<const GateArgs*>(data);
  const int64_t begin = a.rows * thread / team.num_threads, end = a.rows * (thread + 1) / team.num_threads;
  const int64_t whole = a.size / kLanes * kLanes, rest = a.size - whole;
  for (int64_t row = begin; row < end; ++row) {
    const float* gate = a.x + row * 2 * a.size;
    const float* up = gate + a.size;
    float* out = a.out + row * a.size;
    for (int64_t i = 0; i < whole; i += kLanes) store(out + i, G::of(load(gate + i), load(up + i), a));
    if (rest > 0) {
      float lanes[2][kLanes] = {};
      std::memcpy(lanes[0], gate + whole, rest * sizeof(float));
      std::memcpy(lanes[1], up + whole, rest * sizeof(float));
      store(lanes[0], G::of(load(lanes[0]), load(lanes[1]), a));
      std::memcpy(out + whole, lanes[0], rest * sizeof(float));
    }
  }
}

static void gate_and_mul(const GateArgs& a) {
  GateArgs args = a;
  run_parallel(threads_for(a.rows * a.size * 4, a.rows, a.num_threads),
               a.activation == Activation::kClampedSwiglu
                   ? gate_and_mul_thread<ClampedSwiglu>
                   : for_activation(a.activation, gate_and_mul_thread<Times<Silu>>, gate_and_mul_thread<Times<GeluTanh>>,
                                    gate_and_mul_thread<Times<Gelu>>, gate_and_mul_thread<Times<Relu>>,
                                    gate_and_mul_thread<Times<SquaredRelu>>),
               &args);
}

// Rotates the first 2 * half dimensions of a head (RoPE). rotation: cosines, then sines.
PENSTOCK_INLINE void turn(float* head, const float* rotation, int64_t half) {
  const float* cosines = rotation;
  const float* sines = rotation + half;
  float* first = head;
  float* second = head + half;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec x = load(first + i), y = load(second + i), c = load(cosines + i), s = load(sines + i);
    store(first + i, x * c - y * s);
    store(second + i, y * c + x * s);
  }
  for (; i < half; ++i) {
    const float x = first[i], y = second[i];
    first[i] = x * cosines[i] - y * sines[i];
    second[i] = y * cosines[i] + x * sines[i];
  }
}

static void rotary_thread(void* data, int thread, const Team& team) {
  const auto& a = *static_cast<const RotaryArgs*>(data);
  const int64_t begin = a.num_tokens * thread / team.num_threads;
  const int64_t end = a.num_tokens * (thread + 1) / team.num_threads;
  for (int64_t token = begin; token < end; ++token)
    for (int64_t head = 0; head < a.num_heads; ++head)
      turn(a.heads + token * a.token_stride + head * a.head_stride, a.table + a.positions[token] * 2 * a.half, a.half);
}

static void rotary(const RotaryArgs& a) {
  RotaryArgs args = a;
  run_parallel(threads_for(a.num_tokens * a.num_heads * a.half * 2, a.num_tokens, a.num_threads), rotary_thread, &args);
}

// The largest value of a row except NaN, and whether the row has a NaN.
PENSTOCK_INLINE void scan(const float* x, int64_t size, float* largest, bool* has_nan) {
  const int64_t whole = size / kLanes * kLanes;
  Vec most = splat(-__builtin_inff());
  IntVec is_nan = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Vec v = load(x + i);
    most = max(v, most);
    is_nan |= v != v;
  }
  *largest = max_lanes(most);
  *has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) *has_nan |= is_nan[lane] != 0;
  for (int64_t i = whole; i < size; ++i) {
    *has_nan |= x[i] != x[i];
    if (x[i] > *largest) *largest = x[i];
  }
}

// Index of the first NaN or, without one, of the first `largest`, as `scan` found them.
PENSTOCK_INLINE int64_t find(const float* x, float largest, bool has_nan) {
  int64_t index = 0;
  if (has_nan)
    while (x[index] == x[index]) ++index;
  else
    while (x[index] != largest) ++index;
  return index;
}

static void argmax_thread(void* data, int thread, const Team& team) {
  const auto& a = *static_cast<const ArgmaxArgs*>(data);
  const int64_t begin = a.rows * thread / team.num_threads, end = a.rows * (thread + 1) / team.num_threads;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = a.x + row * a.size;
    float largest;
    bool has_nan;
    scan(x, a.size, &largest, &has_nan);
    a.index[row] = find(x, largest, has_nan);
    a.failed[row] = has_nan || !__builtin_isfinite(largest);
    if (a.largest != nullptr) a.largest[row] = x[a.index[row]];
  }
}

static void argmax(const ArgmaxArgs& a) {
  ArgmaxArgs args = a;
  run_parallel(threads_for(a.rows * a.size, a.rows, a.num_threads), argmax_thread, &args);
}

}  // namespace PENSTOCK_NAMESPACE
