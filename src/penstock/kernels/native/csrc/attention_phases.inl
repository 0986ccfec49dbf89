// Attention for every type of cache and every phase.

namespace PENSTOCK_NAMESPACE {

template <class T>
static void write_thread(void* data, int thread, const Team& team) {
  auto& job = *static_cast<AttentionJob*>(data);
  static thread_local Scratch scratch;
  float* key = scratch.get(static_cast<size_t>(job.args->head_size));
  if (key == nullptr) return __atomic_store_n(&job.has_failed, true, __ATOMIC_RELAXED);
  write_all<T>(*job.args, thread, team.num_threads, key);
}

// Calls run(T*) for the type of the cache's elements.
template <class Function>
static void with_cache_type(const AttentionArgs& a, const Function& run) {
  const bool is_float32 = a.cache_type == CacheType::kFloat32;
  if (a.latent_size > 0) {
    if (is_float32) return run(static_cast<Latent<float>*>(nullptr));
    return run(static_cast<Latent<Bfloat16>*>(nullptr));
  }
  if (is_float32) return run(static_cast<float*>(nullptr));
  if (a.cache_type == CacheType::kBfloat16) return run(static_cast<Bfloat16*>(nullptr));
  if (a.cache_type == CacheType::kBfloat16Pairs) return run(static_cast<Paired<Bfloat16Pair>*>(nullptr));
  if (a.cache_type == CacheType::kBfloat16Tiles) return run(static_cast<Paired<TilePair>*>(nullptr));
  run(static_cast<int8_t*>(nullptr));
}

template <class T>
static void write_on_threads(T*, int num_threads, AttentionJob& job) {
  run_parallel(num_threads, write_thread<T>, &job);
}

static bool write_only(const AttentionArgs& a) {
  AttentionJob job{&a, nullptr, 0, false};
  with_cache_type(a, [&](auto* element) { write_on_threads(element, a.num_threads, job); });
  return !job.has_failed;
}

static bool attention(const AttentionArgs& a) {
  if (a.phase == AttentionPhase::kWholeTexts) return encoder_attention(a);
  if (a.phase == AttentionPhase::kWrite) return write_only(a);
  bool has_memory = false;
  with_cache_type(a, [&](auto* element) { has_memory = attention_over(a, element); });
  return has_memory;
}

}  // namespace PENSTOCK_NAMESPACE
