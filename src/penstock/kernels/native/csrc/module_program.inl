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

  bool is_good() { return in.are_good() && program != nullptr; }
};

// (program, kind, width, offset) -> number.
PyObject* program_buffer(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Buffer buffer;
  buffer.kind = static_cast<Buffer::Kind>(call.in.integer());
  buffer.width = call.in.size();
  buffer.offset = call.in.size();
  if (!call.is_good()) return nullptr;
  if (buffer.kind == Buffer::Kind::kWhole && buffer.offset + buffer.width > call.program->whole_size)
    call.program->whole_size = buffer.offset + buffer.width;
  call.program->buffers.push_back(buffer);
  return PyLong_FromLongLong(static_cast<long long>(call.program->buffers.size()) - 1);
}

// What a kernel takes besides its rows. Returns of how many rows it looks some up, or 0.
int64_t read_arguments(Operation& operation, Arguments& in) {
  switch (operation.kind) {
    case Operation::Kind::kNorm: {
      NormArgs& a = operation.norm = {};
      a.weight = in.pointer<const float>();
      a.size = in.size();
      a.eps = in.real();
      a.heads = 1;
      return 0;
    }
    case Operation::Kind::kGate: {
      GateArgs& a = operation.gate = {};
      a.activation = static_cast<Activation>(in.integer());
      a.size = in.size();
      return 0;
    }
    case Operation::Kind::kLinear:
    case Operation::Kind::kGreedy: {
      LinearArgs& a = operation.linear = {};
      a.weight = in.pointer<const void>();
      a.bias = in.pointer<const float>();
      a.in_features = in.size();
      a.out_features = in.size();
      a.weight_type = static_cast<WeightType>(in.integer());
      return 0;
    }
    case Operation::Kind::kQuantizedLinear: {
      QuantizedLinearArgs& a = operation.quantized = {};
      operation.quantized_kernels = quantized_kernels(in);
      a.weight = in.pointer<const void>();
      a.bias = in.pointer<const float>();
      a.shape = quantized_shape(in);
      return 0;
    }
    case Operation::Kind::kAttention: {
      operation.group = in.integer();
      operation.is_last = in.integer() != 0;
      AttentionArgs& a = operation.attention = {};
      a.key_cache = in.pointer<void>();
      a.value_cache = in.pointer<void>();
      a.head_stride = in.size();
      a.cache_type = static_cast<CacheType>(in.integer());
      a.num_heads = in.size();
      a.num_kv_heads = in.size();
      a.head_size = in.size();
      a.block_size = in.size();
      a.window = in.size();
      a.scale = in.real();
      a.soft_cap = in.real();
      a.norm_weight = in.pointer<const float>();
      a.norm_eps = in.real();
      a.rotary_table = in.pointer<const float>();
      a.rotary_half = in.size();
      return 0;
    }
    case Operation::Kind::kLookup: {
      LookupArgs& a = operation.lookup = {};
      a.table = in.pointer<const void>();
      a.num_rows = in.size();
      a.width = in.size();
      a.weight_type = static_cast<WeightType>(in.integer());
      return a.num_rows;
    }
    case Operation::Kind::kRows: {
      RowsArgs& a = operation.rows = {};
      a.weight = in.pointer<const void>();
      const int64_t num_rows = in.size();
      a.in_features = in.size();
      a.weight_type = static_cast<WeightType>(in.integer());
      return num_rows;
    }
    case Operation::Kind::kQuantizedRows: {
      QuantizedRowsArgs& a = operation.quantized_rows = {};
      operation.quantized_kernels = quantized_kernels(in);
      a.weight = in.pointer<const void>();
      a.rest = in.pointer<const void>();
      a.shape = quantized_shape(in);
      return a.shape.out_features;
    }
    case Operation::Kind::kScale: operation.factor = in.real(); return 0;
    case Operation::Kind::kKeepLast: return 0;
    case Operation::Kind::kArgmax: return 0;
  }
  return 0;
}

// (program, kind, number of each buffer or -1, what the kernel takes besides)
PyObject* program_add(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Operation operation{};
  operation.kind = static_cast<Operation::Kind>(call.in.integer());
  operation.in = call.in.integer();
  operation.residual = call.in.integer();
  operation.out = call.in.integer();
  const int64_t num_ids = read_arguments(operation, call.in);
  if (!call.is_good()) return nullptr;
  if (num_ids > 0 && (call.program->num_ids == 0 || num_ids < call.program->num_ids)) call.program->num_ids = num_ids;
  call.program->operations.push_back(operation);
  Py_RETURN_NONE;
}

// (program, address of [ProgramStep, number of groups, StepRequests of each])
PyObject* program_run(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  StoredArguments in(call.in.pointer<const int64_t>());
  if (!call.is_good()) return nullptr;
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
