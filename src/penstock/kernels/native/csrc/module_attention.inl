// Python binding of attention on non-contiguous heads; part of module.cpp.

namespace {

// (operation number, instruction set, threads, address and stride of queries, keys, values and out, StepRequests,
// positions, phase, arguments of the operation, visible ends if there are any) -> status of the collective that failed,
// 0 for none.
PyObject* attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  Operation operation = read_type(in);
  if (operation.type == nullptr) return nullptr;
  const Kernels* kernels = in.kernels();
  AttentionArgs rows{};
  in.read(rows.num_threads, rows.query, rows.query_stride, rows.key, rows.key_stride, rows.value, rows.value_stride,
          rows.out, rows.out_stride, rows.query_start, rows.seq_lens, rows.block_table, rows.block_table_stride,
          rows.num_requests, rows.positions, rows.phase);
  put(operation, {nullptr, FieldType::kTensor, offsetof(AttentionArguments, attention), 1}, rows);
  read_fields(operation, in);
  auto arguments = operation.get<AttentionArguments>();
  arguments.attention.visible_ends = in.has_more() ? in.pointer<const int32_t>() : nullptr;
  if (!in.are_good()) return nullptr;
  AttentionOutcome outcome;
  Py_BEGIN_ALLOW_THREADS;
  outcome = attention_of_ranks(*kernels, arguments.attention, arguments.ranks);
  Py_END_ALLOW_THREADS;
  return outcome.had_memory ? PyLong_FromLongLong(outcome.collective_status) : PyErr_NoMemory();
}

}  // namespace
