// Products between heads and latents of latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

namespace PENSTOCK_NAMESPACE {

struct HeadProductsJob {
  const HeadProductsArgs* args;
  int64_t chunks, next_unit;
  bool has_failed;
};

PENSTOCK_INLINE LinearArgs product_of(const HeadProductsArgs& a, int64_t head, int64_t begin, int64_t end) {
  const int64_t elements = divided_up(a.out_features, kPanel) * kPanel * a.in_features;
  const int64_t bytes = a.weight_type == WeightType::kFloat32 ? sizeof(float) : sizeof(Bfloat16);
  LinearArgs product{};
  product.x = a.x + begin * a.x_stride + head * a.x_head_stride;
  product.x_stride = a.x_stride;
  product.weight = static_cast<const char*>(a.weight) + head * elements * bytes;
  product.bias = a.bias == nullptr ? nullptr : a.bias + head * a.out_features;
  product.out = a.out + begin * a.out_stride + a.out_offset + head * a.out_head_stride;
  product.out_stride = a.out_stride;
  product.rows = end - begin;
  product.in_features = a.in_features;
  product.out_features = a.out_features;
  product.weight_type = a.weight_type;
  product.num_threads = 1;
  return product;
}

static void head_products_thread(void* data, int, const Team&) {
  auto& job = *static_cast<HeadProductsJob*>(data);
  const HeadProductsArgs& a = *job.args;
  for (;;) {
    const int64_t unit = __atomic_sub_fetch(&job.next_unit, 1, __ATOMIC_RELAXED);
    if (unit < 0) return;
    const int64_t chunk = unit % job.chunks;
    const int64_t begin = a.rows * chunk / job.chunks, end = a.rows * (chunk + 1) / job.chunks;
    if (!linear(product_of(a, unit / job.chunks, begin, end))) __atomic_store_n(&job.has_failed, true, __ATOMIC_RELAXED);
  }
}

// Units of work that a thread should find at least.
constexpr int64_t kUnitsPerThread = 4;

static bool head_products(const HeadProductsArgs& a) {
  const int64_t wanted = divided_up(kUnitsPerThread * a.num_threads, a.heads), most = divided_up(a.rows, kTileRows);
  HeadProductsJob job{&a, least(wanted, most), 0, false};
  job.next_unit = a.heads * job.chunks;
  const bool is_small = a.heads * a.rows * a.in_features * a.out_features < kProductsPerTurn;
  run_parallel(is_small ? 1 : a.num_threads, head_products_thread, &job);
  return !job.has_failed;
}

// The rotary part of a head: as it is, or the first ones of all adjacent pairs, then the second ones.
PENSTOCK_INLINE void copy_rotary(const float* from, int64_t size, bool is_interleaved, float* to) {
  if (!is_interleaved) {
    std::memcpy(to, from, size * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < size / 2; ++i) {
    to[i] = from[2 * i];
    to[size / 2 + i] = from[2 * i + 1];
  }
}

static void latent_rows_thread(void* data, int thread, const Team& team) {
  const AbsorbArgs& a = *static_cast<const AbsorbArgs*>(data);
  const HeadProductsArgs& p = a.product;
  const int64_t begin = p.rows * thread / team.num_threads, end = p.rows * (thread + 1) / team.num_threads;
  for (int64_t row = begin; row < end; ++row) {
    const float* query = p.x + row * p.x_stride + p.in_features;
    const float* latent = a.latents + row * a.latents_stride + a.latent_offset;
    float* out = p.out + row * p.out_stride;
    for (int64_t head = 0; head < p.heads; ++head)
      copy_rotary(query + head * p.x_head_stride, a.rotary_size, a.is_interleaved, out + head * p.out_head_stride);
    float* key = out + p.heads * p.out_head_stride;
    copy_rotary(latent + p.out_features, a.rotary_size, a.is_interleaved, key);
    normalise(latent, a.norm_weight, key + a.rotary_size, p.out_features, a.norm_eps);
  }
}

static bool absorb(const AbsorbArgs& args) {
  AbsorbArgs a = args;
  HeadProductsArgs& p = a.product;
  p.x_head_stride = p.in_features + a.rotary_size;
  p.out_head_stride = a.rotary_size + p.out_features;
  p.out_offset = a.rotary_size;
  run_parallel(threads_for(p.rows * (p.heads + 1) * p.out_head_stride, p.rows, p.num_threads), latent_rows_thread, &a);
  return head_products(p);
}

}  // namespace PENSTOCK_NAMESPACE
