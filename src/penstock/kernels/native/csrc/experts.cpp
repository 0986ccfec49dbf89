#include "experts.h"

#include <cmath>
#include <cstring>

#include "parallel.h"
#include "program.h"
#include "scratch.h"

namespace penstock {
namespace {

// As `NativeExperts` checks.
constexpr int64_t kMostExperts = 1024;
// Rows of an expert that go through its operations together; as many as between the kernels of a program.
constexpr int64_t kRowsAtOnce = 256;
// Elements below which waking other threads costs more than it saves.
constexpr int64_t kAlone = 16 * 1024;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls body(begin, end) on ranges of `count` rows, one per thread.
template <class Body>
void over_rows(int64_t count, int64_t elements_per_row, int num_threads, const Body& body) {
  struct Job {
    const Body& body;
    int64_t count;
  } job{body, count};
  if (num_threads == 1 || count == 1 || count * elements_per_row < kAlone) return body(0, count);
  const auto run = [](void* data, int thread, const Team& team) {
    const Job& job = *static_cast<const Job*>(data);
    job.body(job.count * thread / team.num_threads, job.count * (thread + 1) / team.num_threads);
  };
  run_parallel(num_threads, run, &job);
}

void score(const RoutingRule& rule, const float* logits, float* scores) {
  const int64_t count = rule.num_experts;
  if (rule.scoring == Scoring::kSigmoid) {
    for (int64_t i = 0; i < count; ++i) scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
    return;
  }
  float largest = logits[0], sum = 0.0f;
  for (int64_t i = 1; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
  for (int64_t i = 0; i < count; ++i) sum += scores[i] = std::exp(logits[i] - largest);
  for (int64_t i = 0; i < count; ++i) scores[i] /= sum;
}

// The best item that is not taken.
int64_t best_of(const float* values, int64_t count, const bool* is_taken) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i)
    if (!is_taken[i] && (best < 0 || values[i] > values[best] || values[best] != values[best])) best = i;
  return best;
}

// Takes the `most` best of `count` items: sets `is_taken`, and returns the sum of their values.
float take_best(const float* values, int64_t count, int64_t most, bool* is_taken) {
  float sum = 0.0f;
  for (int64_t n = 0; n < most; ++n) {
    const int64_t best = best_of(values, count, is_taken);
    is_taken[best] = true;
    sum += values[best];
  }
  return sum;
}

// SparseMixer: takes the best experts one after the other. The score of each is its softmax over those not taken before
// that are near it.
void take_one_by_one(const RoutingRule& rule, const float* logits, float* scores, bool* is_taken) {
  for (int64_t n = 0; n < rule.top_k; ++n) {
    const int64_t best = best_of(logits, rule.num_experts, is_taken);
    float sum = 0.0f;
    for (int64_t i = 0; i < rule.num_experts; ++i) {
      const float distance = (logits[best] - logits[i]) / std::fmax(std::fabs(logits[i]), logits[best]);
      if (!is_taken[i] && !(distance > 2.0f * rule.jitter)) sum += std::exp(logits[i] - logits[best]);
    }
    is_taken[best] = true;
    scores[best] = 1.0f / sum;
  }
}

// Gives the experts of all but the best groups the lowest value.
void keep_best_groups(const RoutingRule& rule, float* marks) {
  float of_groups[kMostExperts];
  bool is_kept[kMostExperts] = {};
  const int64_t size = rule.num_experts / rule.num_groups;
  for (int64_t group = 0; group < rule.num_groups; ++group) {
    bool is_taken[kMostExperts] = {};
    of_groups[group] = take_best(marks + group * size, size, rule.best_of_group, is_taken);
  }
  take_best(of_groups, rule.num_groups, rule.top_groups, is_kept);
  for (int64_t i = 0; i < rule.num_experts; ++i)
    if (!is_kept[i / size]) marks[i] = -__builtin_inff();
}

void route_row(const RoutingRule& rule, const float* logits, int32_t* experts, float* weights) {
  float scores[kMostExperts], marks[kMostExperts];
  bool is_taken[kMostExperts] = {};
  if (rule.scoring == Scoring::kSparseMixer) {
    take_one_by_one(rule, logits, scores, is_taken);
  } else {
    score(rule, logits, scores);
    for (int64_t i = 0; i < rule.num_experts; ++i)
      marks[i] = rule.bias == nullptr ? scores[i] : scores[i] + rule.bias[i];
    if (rule.num_groups > 1) keep_best_groups(rule, marks);
    take_best(marks, rule.num_experts, rule.top_k, is_taken);
  }
  int64_t n = 0;
  float sum = 0.0f;
  for (int64_t i = 0; i < rule.num_experts; ++i) {
    if (!is_taken[i]) continue;
    experts[n] = static_cast<int32_t>(i);
    sum += weights[n++] = scores[i];
  }
  if (rule.normalizes) {
    if (rule.scoring == Scoring::kSigmoid) sum += 1e-20f;
    if (sum < rule.least_sum) sum = rule.least_sum;
    for (n = 0; n < rule.top_k; ++n) weights[n] /= sum;
  }
  for (n = 0; n < rule.top_k; ++n) weights[n] *= rule.scale;
}

// Rows of one expert, and memory for what its operations make of them.
struct Pieces {
  const int32_t* pairs;  // of row and expert: row * top_k + number of the expert among the row's
  int64_t count;
  float *given, *gate_up, *inner, *made;
};

// An operation of an expert over rows without gaps.
Result run(const Operation& operation, const Call& call, const Rows& x, const Rows& out, int64_t count) {
  Call of_expert{call.kernels, x, {nullptr, 0}, out, nullptr, nullptr, nullptr, 0, count, call.num_threads, call.step};
  return operation.type->run(operation, of_expert);
}

Result add_expert(const ExpertsArguments& a, const Call& call, const ExpertOperations& expert, const Pieces& p,
                  const float* weights) {
  const int64_t size = call.x.stride, out_size = call.out.stride, top_k = a.rule.top_k;
  over_rows(p.count, size, call.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(p.given + i * size, call.x.at + p.pairs[i] / top_k * size, size * sizeof(float));
  });
  const Rows given{p.given, size}, gate_up{p.gate_up, a.gate_up_size}, inner{p.inner, a.inner_size};
  const Rows made{p.made, out_size};
  Result result = run(expert.gate_up, call, given, gate_up, p.count);
  if (result.is_good()) result = run(expert.activation, call, gate_up, inner, p.count);
  if (result.is_good()) result = run(expert.down, call, inner, made, p.count);
  if (!result.is_good()) return result;
  over_rows(p.count, out_size, call.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // Two loops, so that no compiler fuses them into one operation with other rounding.
      float* row = p.made + i * out_size;
      float* to = call.out.at + p.pairs[i] / top_k * out_size;
      const float weight = weights[p.pairs[i]];
      for (int64_t d = 0; d < out_size; ++d) row[d] *= weight;
      if (p.pairs[i] % top_k == 0)
        std::memcpy(to, row, out_size * sizeof(float));
      else
        for (int64_t d = 0; d < out_size; ++d) to[d] += row[d];
    }
  });
  return kDone;
}

}  // namespace

void route(const RouteArgs& a) {
  over_rows(a.rows, a.rule.num_experts * (4 + a.rule.top_k), a.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      route_row(a.rule, a.logits + row * a.stride, a.experts + row * a.rule.top_k, a.weights + row * a.rule.top_k);
  });
}

Result experts(const Operation& operation, const Call& call) {
  static thread_local Scratch scratch;
  const auto a = operation.get<ExpertsArguments>();
  const int64_t rows = call.step == nullptr ? call.num_rows : least(call.num_rows, call.step->num_tokens);
  const int64_t num_pairs = rows * a.rule.top_k, size = call.x.stride, out_size = call.out.stride;
  std::memset(call.out.at + rows * out_size, 0, (call.num_rows - rows) * out_size * sizeof(float));
  if (rows == 0) return kDone;
  const int64_t most = least(rows, kRowsAtOnce), each = size + a.gate_up_size + a.inner_size + out_size;
  float* memory = scratch.get(static_cast<size_t>(3 * num_pairs + most * each));
  if (memory == nullptr) return {false, 0};
  float* given = memory;
  float* weights = given + most * each;
  auto* chosen = reinterpret_cast<int32_t*>(weights + num_pairs);
  int32_t* pairs = chosen + num_pairs;
  route({a.rule, call.second.at, call.second.stride, rows, chosen, weights, call.num_threads});

  // Pairs by expert; those of one expert stay in the order of their rows.
  int64_t starts[kMostExperts + 1] = {}, next[kMostExperts];
  for (int64_t i = 0; i < num_pairs; ++i) ++starts[chosen[i] + 1];
  for (int64_t e = 0; a.load != nullptr && e < a.rule.num_experts; ++e) a.load[e] += starts[e + 1];
  for (int64_t e = 0; e < a.rule.num_experts; ++e) starts[e + 1] += starts[e];
  for (int64_t e = 0; e < a.rule.num_experts; ++e) next[e] = starts[e];
  for (int64_t i = 0; i < num_pairs; ++i) pairs[next[chosen[i]]++] = static_cast<int32_t>(i);

  for (int64_t e = 0; e < a.rule.num_experts; ++e)
    for (int64_t first = starts[e]; first < starts[e + 1]; first += kRowsAtOnce) {
      Pieces p{pairs + first, least(kRowsAtOnce, starts[e + 1] - first), given, nullptr, nullptr, nullptr};
      p.gate_up = p.given + most * size;
      p.inner = p.gate_up + most * a.gate_up_size;
      p.made = p.inner + most * a.inner_size;
      const Result result = add_expert(a, call, a.experts[e], p, weights);
      if (!result.is_good()) return result;
    }
  return kDone;
}

}  // namespace penstock
