// Attention as a Python function; part of module.cpp.

namespace {

// The status of the meeting that failed, 0 for none.
PyObject* attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  AttentionArgs a;
  Ranks ranks;
  in.read(a.query, a.query_stride, a.key, a.key_stride, a.value, a.value_stride, a.key_cache, a.value_cache,
          a.head_stride, a.cache_type, a.query_start, a.seq_lens, a.block_table, a.block_table_stride, a.num_requests,
          a.out, a.out_stride, a.num_heads, a.num_kv_heads, a.head_size, a.block_size, a.window, a.scale, a.soft_cap,
          a.norm_weight, a.norm_eps, a.rotary_table, a.rotary_half, a.positions, a.phase, a.num_threads);
  read(in, ranks);
  in.read(a.interleave);
  if (!in.are_good()) return nullptr;
  AttentionOutcome outcome;
  Py_BEGIN_ALLOW_THREADS;
  outcome = attention_of_ranks(*kernels, a, ranks);
  Py_END_ALLOW_THREADS;
  return outcome.had_memory ? PyLong_FromLongLong(outcome.meeting_status) : PyErr_NoMemory();
}

}  // namespace
