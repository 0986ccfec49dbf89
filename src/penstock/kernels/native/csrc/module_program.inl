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
  call.in.read(buffer.kind, buffer.width, buffer.offset);
  if (!call.is_good()) return nullptr;
  if (buffer.kind == Buffer::Kind::kWhole && buffer.offset + buffer.width > call.program->whole_size)
    call.program->whole_size = buffer.offset + buffer.width;
  call.program->buffers.push_back(buffer);
  return PyLong_FromLongLong(static_cast<long long>(call.program->buffers.size()) - 1);
}

void read(Arguments& in, TokenShare& share) { in.read(share.start, share.size, share.whole); }

// What a kernel takes besides its rows. Returns of how many rows it looks some up, or 0.
int64_t read_arguments(Operation& operation, Arguments& in) {
  switch (operation.kind) {
    case Operation::Kind::kNorm: {
      NormArgs& a = operation.norm = {};
      in.read(a.weight, a.size, a.eps);
      a.heads = 1;
      return 0;
    }
    case Operation::Kind::kGate: {
      GateArgs& a = operation.gate = {};
      in.read(a.activation, a.size);
      return 0;
    }
    case Operation::Kind::kLinear:
    case Operation::Kind::kGreedy: {
      LinearArgs& a = operation.linear = {};
      in.read(a.weight, a.bias, a.in_features, a.out_features, a.weight_type);
      return 0;
    }
    case Operation::Kind::kQuantizedLinear: {
      QuantizedLinearArgs& a = operation.quantized = {};
      operation.quantized_kernels = quantized_kernels(in);
      in.read(a.weight, a.bias);
      a.shape = quantized_shape(in);
      return 0;
    }
    case Operation::Kind::kAttention: {
      in.read(operation.group);
      operation.is_last = in.integer() != 0;
      AttentionArgs& a = operation.attention = {};
      in.read(a.key_cache, a.value_cache, a.head_stride, a.cache_type, a.num_heads, a.num_kv_heads, a.head_size,
              a.block_size, a.window, a.scale, a.soft_cap, a.norm_weight, a.norm_eps, a.rotary_table, a.rotary_half);
      read(in, operation.ranks);
      in.read(a.interleave);
      return 0;
    }
    case Operation::Kind::kLookup: {
      read(in, operation.share);
      LookupArgs& a = operation.lookup = {};
      in.read(a.table, a.num_rows, a.width, a.weight_type);
      return operation.share.size > 0 ? operation.share.whole : a.num_rows;
    }
    case Operation::Kind::kRows: {
      read(in, operation.share);
      RowsArgs& a = operation.rows = {};
      int64_t num_rows;
      in.read(a.weight, num_rows, a.in_features, a.weight_type);
      return operation.share.size > 0 ? operation.share.whole : num_rows;
    }
    case Operation::Kind::kQuantizedRows: {
      read(in, operation.share);
      QuantizedRowsArgs& a = operation.quantized_rows = {};
      operation.quantized_kernels = quantized_kernels(in);
      in.read(a.weight, a.rest);
      a.shape = quantized_shape(in);
      return operation.share.size > 0 ? operation.share.whole : a.shape.out_features;
    }
    case Operation::Kind::kScale: operation.factor = in.real(); return 0;
    case Operation::Kind::kKeepLast: return 0;
    case Operation::Kind::kArgmax: return 0;
    case Operation::Kind::kSum: return 0;
    case Operation::Kind::kConcatenate: return 0;
    case Operation::Kind::kAllReduce: read(in, operation.ranks); return 0;
    case Operation::Kind::kMergeChoices:
      read(in, operation.ranks);
      in.read(operation.first_index);
      return 0;
  }
  return 0;
}

// (program, kind, number of each buffer or -1, what the kernel takes besides)
PyObject* program_add(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Operation operation{};
  call.in.read(operation.kind, operation.in, operation.residual, operation.out);
  const int64_t num_ids = read_arguments(operation, call.in);
  if (!call.is_good()) return nullptr;
  if (num_ids > 0 && (call.program->num_ids == 0 || num_ids < call.program->num_ids)) call.program->num_ids = num_ids;
  call.program->operations.push_back(operation);
  Py_RETURN_NONE;
}

// (program, address of [ProgramStep, number of groups, StepRequests of each]) -> None, or where ranks did not meet
// (number of the operation, of its rows, status of the meeting).
PyObject* program_run(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  StoredArguments in(call.in.pointer<const int64_t>());
  if (!call.is_good()) return nullptr;
  ProgramStep step;
  in.read(step.output, step.workspace, step.ids, step.index, step.failed, step.input, step.positions, step.num_rows,
          step.num_tokens, step.num_threads, step.last.rows, step.last.positions, step.last.query_start,
          step.last.seq_lens, step.last.count);
  StepRequests groups[kMaxGroups];
  const int64_t num_groups = in.size();
  if (num_groups > kMaxGroups) return PyErr_Format(PyExc_ValueError, "more than %d KV-cache groups", kMaxGroups);
  for (int64_t group = 0; group < num_groups; ++group) {
    in.read(groups[group].query_start, groups[group].seq_lens, groups[group].block_table,
            groups[group].block_table_stride, groups[group].num_requests);
  }
  step.groups = groups;
  // One that goes on from rows looks up nothing.
  if (call.program->num_ids > 0 && !are_rows(step.ids, step.num_rows, call.program->num_ids)) return nullptr;
  ProgramOutcome outcome;
  Py_BEGIN_ALLOW_THREADS;
  outcome = run_program(*call.program, step);
  Py_END_ALLOW_THREADS;
  if (!outcome.had_memory) return PyErr_NoMemory();
  if (outcome.meeting_status != 0)
    return Py_BuildValue("LLL", static_cast<long long>(outcome.operation), static_cast<long long>(outcome.num_rows),
                         static_cast<long long>(outcome.meeting_status));
  Py_RETURN_NONE;
}

}  // namespace
