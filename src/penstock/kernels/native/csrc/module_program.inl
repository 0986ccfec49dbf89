// Python functions that make and run programs; part of module.cpp.

namespace {

constexpr char kProgramName[] = "penstock.program";
constexpr int kMaxGroups = 64;

Program* program_of(PyObject* capsule) {
  return static_cast<Program*>(PyCapsule_GetPointer(capsule, kProgramName));
}

void delete_program(PyObject* capsule) { delete program_of(capsule); }

// (kernels, rows at once) -> program.
PyObject* program_new(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  const int64_t rows_at_once = in.size();
  if (!in.are_good()) return nullptr;
  auto* program = new (std::nothrow) Program{kernels, rows_at_once, 0, 0, {}, {}};
  if (program == nullptr) return PyErr_NoMemory();
  PyObject* capsule = PyCapsule_New(program, kProgramName, delete_program);
  if (capsule == nullptr) delete program;
  return capsule;
}

// The first of a function's arguments, and the others.
struct ProgramCall {
  Program* program;
  Arguments in;
  ProgramCall(PyObject* const* values, Py_ssize_t count)
      : program(count < 1 ? nullptr : program_of(values[0])), in(values + 1, count < 1 ? 0 : count - 1) {}

  PyObject* add(const Operation& operation) {
    if (!in.are_good() || program == nullptr) return nullptr;
    program->operations.push_back(operation);
    Py_RETURN_NONE;
  }

  // An operation that reads rows of so many.
  PyObject* add_lookup(const Operation& operation, int64_t num_rows) {
    if (program != nullptr && (program->num_ids == 0 || num_rows < program->num_ids)) program->num_ids = num_rows;
    return add(operation);
  }
};

// (program, kind, width, offset) -> number.
PyObject* program_buffer(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Buffer buffer;
  buffer.kind = static_cast<Buffer::Kind>(call.in.integer());
  buffer.width = call.in.size();
  buffer.offset = call.in.size();
  if (!call.in.are_good() || call.program == nullptr) return nullptr;
  if (buffer.kind == Buffer::Kind::kWhole && buffer.offset + buffer.width > call.program->whole_size)
    call.program->whole_size = buffer.offset + buffer.width;
  call.program->buffers.push_back(buffer);
  return PyLong_FromLongLong(static_cast<long long>(call.program->buffers.size()) - 1);
}

PyObject* program_norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Operation operation{};
  operation.kind = Operation::Kind::kNorm;
  operation.in = call.in.integer();
  operation.residual = call.in.integer();
  operation.out = call.in.integer();
  operation.norm = {};
  operation.norm.weight = call.in.pointer<const float>();
  operation.norm.size = call.in.size();
  operation.norm.eps = call.in.real();
  operation.norm.heads = 1;
  return call.add(operation);
}

PyObject* program_gate(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Operation operation{};
  operation.kind = Operation::Kind::kGate;
  operation.in = call.in.integer();
  operation.out = call.in.integer();
  operation.gate = {};
  operation.gate.activation = static_cast<Activation>(call.in.integer());
  operation.gate.size = call.in.size();
  return call.add(operation);
}

PyObject* program_linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Operation operation{};
  operation.kind = Operation::Kind::kLinear;
  operation.in = call.in.integer();
  operation.out = call.in.integer();
  operation.linear = {};
  operation.linear.weight = call.in.pointer<const void>();
  operation.linear.bias = call.in.pointer<const float>();
  operation.linear.in_features = call.in.size();
  operation.linear.out_features = call.in.size();
  operation.linear.weight_type = static_cast<WeightType>(call.in.integer());
  return call.add(operation);
}

PyObject* program_quantized_linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Operation operation{};
  operation.kind = Operation::Kind::kQuantizedLinear;
  operation.in = call.in.integer();
  operation.out = call.in.integer();
  operation.quantized_kernels = quantized_kernels(call.in);
  operation.quantized = {};
  operation.quantized.weight = call.in.pointer<const void>();
  operation.quantized.bias = call.in.pointer<const float>();
  operation.quantized.shape = quantized_shape(call.in);
  return call.add(operation);
}

PyObject* program_attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Operation operation{};
  operation.kind = Operation::Kind::kAttention;
  operation.in = call.in.integer();
  operation.out = call.in.integer();
  operation.group = call.in.integer();
  operation.is_last = call.in.integer() != 0;
  AttentionArgs& a = operation.attention = {};
  a.key_cache = call.in.pointer<void>();
  a.value_cache = call.in.pointer<void>();
  a.head_stride = call.in.size();
  a.cache_type = static_cast<CacheType>(call.in.integer());
  a.num_heads = call.in.size();
  a.num_kv_heads = call.in.size();
  a.head_size = call.in.size();
  a.block_size = call.in.size();
  a.window = call.in.size();
  a.scale = call.in.real();
  a.soft_cap = call.in.real();
  a.norm_weight = call.in.pointer<const float>();
  a.norm_eps = call.in.real();
  a.rotary_table = call.in.pointer<const float>();
  a.rotary_half = call.in.size();
  return call.add(operation);
}

PyObject* program_lookup(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Operation operation{};
  operation.kind = Operation::Kind::kLookup;
  operation.out = call.in.integer();
  operation.lookup = {};
  operation.lookup.table = call.in.pointer<const void>();
  operation.lookup.num_rows = call.in.size();
  operation.lookup.width = call.in.size();
  operation.lookup.weight_type = static_cast<WeightType>(call.in.integer());
  return call.add_lookup(operation, operation.lookup.num_rows);
}

PyObject* program_rows(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Operation operation{};
  operation.kind = Operation::Kind::kRows;
  operation.out = call.in.integer();
  operation.rows = {};
  operation.rows.weight = call.in.pointer<const void>();
  const int64_t num_rows = call.in.size();
  operation.rows.in_features = call.in.size();
  operation.rows.weight_type = static_cast<WeightType>(call.in.integer());
  return call.add_lookup(operation, num_rows);
}

PyObject* program_quantized_rows(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Operation operation{};
  operation.kind = Operation::Kind::kQuantizedRows;
  operation.out = call.in.integer();
  operation.quantized_kernels = quantized_kernels(call.in);
  operation.quantized_rows = {};
  operation.quantized_rows.weight = call.in.pointer<const void>();
  operation.quantized_rows.rest = call.in.pointer<const void>();
  operation.quantized_rows.shape = quantized_shape(call.in);
  return call.add_lookup(operation, operation.quantized_rows.shape.out_features);
}

PyObject* program_scale(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Operation operation{};
  operation.kind = Operation::Kind::kScale;
  operation.in = call.in.integer();
  operation.factor = call.in.real();
  return call.add(operation);
}

PyObject* program_keep_last(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Operation operation{};
  operation.kind = Operation::Kind::kKeepLast;
  operation.in = call.in.integer();
  return call.add(operation);
}

PyObject* program_greedy(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Operation operation{};
  operation.kind = Operation::Kind::kGreedy;
  operation.in = call.in.integer();
  operation.greedy = {};
  LinearArgs& product = operation.greedy.product;
  product.weight = call.in.pointer<const void>();
  product.in_features = call.in.size();
  product.out_features = call.in.size();
  product.weight_type = static_cast<WeightType>(call.in.integer());
  return call.add(operation);
}

PyObject* program_argmax(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Operation operation{};
  operation.kind = Operation::Kind::kArgmax;
  operation.in = call.in.integer();
  operation.argmax = {};
  operation.argmax.size = call.in.size();
  return call.add(operation);
}

// (program, address of [ProgramStep, number of groups, StepRequests of each])
PyObject* program_run(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  StoredArguments in(call.in.pointer<const int64_t>());
  if (!call.in.are_good() || call.program == nullptr) return nullptr;
  ProgramStep step;
  step.output = in.pointer<float>();
  step.workspace = in.pointer<float>();
  step.ids = in.pointer<const int32_t>();
  step.index = in.pointer<int64_t>();
  step.failed = in.pointer<bool>();
  step.positions = in.pointer<const int64_t>();
  step.num_rows = in.size();
  step.num_tokens = in.size();
  step.num_threads = in.integer();
  step.last.rows = in.pointer<const int64_t>();
  step.last.positions = in.pointer<const int64_t>();
  step.last.query_start = in.pointer<const int32_t>();
  step.last.count = in.size();
  StepRequests groups[kMaxGroups];
  const int64_t num_groups = in.size();
  if (num_groups > kMaxGroups) return PyErr_Format(PyExc_ValueError, "more than %d KV-cache groups", kMaxGroups);
  for (int64_t group = 0; group < num_groups; ++group) {
    groups[group].query_start = in.pointer<const int32_t>();
    groups[group].seq_lens = in.pointer<const int32_t>();
    groups[group].block_table = in.pointer<const int32_t>();
    groups[group].block_table_stride = in.size();
    groups[group].num_requests = in.size();
  }
  step.groups = groups;
  if (!are_rows(step.ids, step.num_rows, call.program->num_ids)) return nullptr;
  bool had_memory;
  Py_BEGIN_ALLOW_THREADS;
  had_memory = run_program(*call.program, step);
  Py_END_ALLOW_THREADS;
  if (!had_memory) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

}  // namespace
