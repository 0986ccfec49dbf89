// Python bindings to call operations, and to record and run programs; part of module.cpp.

namespace {

constexpr char kProgramName[] = "penstock.program";
constexpr int kMaxGroups = 64, kMaxInputs = 64;

Program* program_of(PyObject* capsule) {
  return static_cast<Program*>(PyCapsule_GetPointer(capsule, kProgramName));
}

void delete_program(PyObject* capsule) { delete program_of(capsule); }

// A list per operation: name, scope, uses, input, whether it chooses, and (name, type, alignment) of its fields.
PyObject* operation_types(PyObject*, PyObject*) {
  PyObject* types = PyList_New(0);
  for (int number = 0; const OperationType* type = operation_type(number); ++number) {
    PyObject* fields = PyList_New(0);
    for (const Field* field = type->fields; fields != nullptr && field->name != nullptr; ++field) {
      PyObject* entry = Py_BuildValue("(sii)", field->name, static_cast<int>(field->type), field->alignment);
      if (entry == nullptr || PyList_Append(fields, entry) != 0) Py_CLEAR(fields);
      Py_XDECREF(entry);
    }
    PyObject* entry = fields == nullptr ? nullptr
                                        : Py_BuildValue("(siiiiiiN)", type->name, static_cast<int>(type->scope),
                                                        static_cast<int>(type->x), static_cast<int>(type->second),
                                                        static_cast<int>(type->out), static_cast<int>(type->input),
                                                        static_cast<int>(type->chooses), fields);
    if (types == nullptr || entry == nullptr || PyList_Append(types, entry) != 0) {
      Py_XDECREF(entry);
      Py_XDECREF(types);
      return nullptr;
    }
    Py_DECREF(entry);
  }
  return types;
}

template <class T>
void put(Operation& operation, const Field& field, T value) {
  std::memcpy(operation.arguments + field.offset, &value, sizeof value);
}

// Constant arguments of an operation, in the order of its type's fields.
void read_fields(Operation& operation, Arguments& in) {
  for (const Field* field = operation.type->fields; field->name != nullptr; ++field) {
    switch (field->type) {
      case FieldType::kFloats:
      case FieldType::kPacked:
      case FieldType::kTensor: put(operation, *field, in.pointer<void>()); break;
      case FieldType::kInt64: put(operation, *field, in.size()); break;
      case FieldType::kInt32: put(operation, *field, in.integer()); break;
      case FieldType::kFloat: put(operation, *field, in.real()); break;
      case FieldType::kQuantizedKernels: put(operation, *field, quantized_kernels(in)); break;
    }
  }
}

// Operation by number; sets an error where there is none.
Operation read_type(Arguments& in) {
  Operation operation{operation_type(in.size()), {}};
  if (operation.type == nullptr && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "there is no such operation");
  return operation;
}

Rows read_rows(Arguments& in, Use use) {
  Rows rows{nullptr, 0};
  if (use != Use::kNone) in.read(rows.at, rows.stride);
  return rows;
}

// (number, instruction set, rows, threads, address and stride of each of x, second and out that it has, step input if
// it reads one, index and failed if it chooses, arguments)
PyObject* operation(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  Operation operation = read_type(in);
  if (operation.type == nullptr) return nullptr;
  const OperationType& type = *operation.type;
  Call call{};
  call.kernels = in.kernels();
  in.read(call.num_rows, call.num_threads);
  call.x = read_rows(in, type.x);
  call.second = read_rows(in, type.second);
  call.out = read_rows(in, type.out);
  if (type.input != InputType::kNone) call.input = in.pointer<const void>();
  if (type.chooses) in.read(call.index, call.failed);
  read_fields(operation, in);
  if (!in.are_good()) return nullptr;
  // Meta tensors have sizes and no memory: nothing to compute.
  const void* read = type.x != Use::kNone ? static_cast<const void*>(call.x.at) : call.input;
  const void* made = type.chooses ? static_cast<const void*>(call.index) : static_cast<const void*>(call.out.at);
  if (read == nullptr || made == nullptr) return PyLong_FromLong(0);
  if (type.num_known_rows != nullptr &&
      !are_rows(static_cast<const int32_t*>(call.input), call.num_rows, type.num_known_rows(operation)))
    return nullptr;
  Result result;
  Py_BEGIN_ALLOW_THREADS;
  result = type.run(operation, call);
  Py_END_ALLOW_THREADS;
  return result.had_memory ? PyLong_FromLongLong(result.status) : PyErr_NoMemory();
}

// (number, instruction set, rows, actual tokens, threads, address and stride of each of x, second and out that it has,
// StepRequests, arguments): an operation over the requests of a step, whose group is 0.
PyObject* step_operation(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  Operation operation = read_type(in);
  if (operation.type == nullptr) return nullptr;
  ProgramStep step{};
  StepRequests requests;
  Call call{};
  call.kernels = in.kernels();
  in.read(step.num_rows, step.num_tokens, call.num_threads);
  call.x = read_rows(in, operation.type->x);
  call.second = read_rows(in, operation.type->second);
  call.out = read_rows(in, operation.type->out);
  in.read(requests.query_start, requests.seq_lens, requests.block_table, requests.block_table_stride,
          requests.num_requests);
  read_fields(operation, in);
  if (!in.are_good()) return nullptr;
  call.num_rows = step.num_rows;
  step.groups = &requests;
  call.step = &step;
  Result result;
  Py_BEGIN_ALLOW_THREADS;
  result = operation.type->run(operation, call);
  Py_END_ALLOW_THREADS;
  if (!result.had_memory) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// Bytes of an operation, as `store_operation` writes it.
PyObject* operation_bytes(PyObject*, PyObject*) { return PyLong_FromSize_t(sizeof(Operation)); }

// (address, operation number, arguments): writes the operation to memory, for another operation that runs it.
PyObject* store_operation(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  auto* to = in.pointer<Operation>();
  Operation operation = read_type(in);
  if (operation.type == nullptr) return nullptr;
  read_fields(operation, in);
  if (!in.are_good()) return nullptr;
  std::memcpy(static_cast<void*>(to), &operation, sizeof operation);
  Py_RETURN_NONE;
}

// (logits, stride, rows, experts, weights, threads, the rule's fields in the order of "experts")
PyObject* route(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  RouteArgs a;
  in.read(a.logits, a.stride, a.rows, a.experts, a.weights, a.num_threads, a.rule.bias, a.rule.num_experts,
          a.rule.top_k, a.rule.scoring, a.rule.normalizes, a.rule.scale, a.rule.num_groups, a.rule.top_groups,
          a.rule.best_of_group, a.rule.least_sum, a.rule.jitter);
  if (!in.are_good()) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  penstock::route(a);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

// (kernels, rows at once) -> program.
PyObject* program_new(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  const int64_t rows_at_once = in.size();
  if (!in.are_good()) return nullptr;
  auto* program = new (std::nothrow) Program{kernels, rows_at_once, 0, {}, {}, {}};
  if (program == nullptr) return PyErr_NoMemory();
  PyObject* capsule = PyCapsule_New(program, kProgramName, delete_program);
  if (capsule == nullptr) delete program;
  return capsule;
}

// The program as first argument, and the remaining arguments.
struct ProgramCall {
  Program* program;
  Arguments in;
  ProgramCall(PyObject* const* values, Py_ssize_t count)
      : program(count < 1 ? nullptr : program_of(values[0])), in(values + 1, count < 1 ? 0 : count - 1) {}

  bool is_good() { return in.are_good() && program != nullptr; }
};

// (program, kind, width, offset) -> buffer number.
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

// (program, operation number, buffers of x, second and out or -1, step input or -1, reads_last, narrows, arguments)
PyObject* program_add(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  Step step{read_type(call.in), 0, 0, 0, 0, false, false};
  if (step.operation.type == nullptr) return nullptr;
  call.in.read(step.x, step.second, step.out, step.input, step.reads_last, step.narrows);
  read_fields(step.operation, call.in);
  if (!call.is_good()) return nullptr;
  if (const auto known_rows = step.operation.type->num_known_rows)
    call.program->limits.push_back({step.input, known_rows(step.operation)});
  call.program->steps.push_back(step);
  Py_RETURN_NONE;
}

// (program, whether to measure): begins, or ends, measuring the time of each step.
PyObject* program_measure(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  const bool measures = call.in.integer() != 0;
  if (!call.is_good()) return nullptr;
  call.program->nanoseconds.assign(measures ? call.program->steps.size() : 0, 0);
  Py_RETURN_NONE;
}

// (program) -> nanoseconds of each step since measuring began.
PyObject* program_times(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  if (!call.is_good()) return nullptr;
  const auto& times = call.program->nanoseconds;
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(times.size()));
  for (size_t i = 0; list != nullptr && i < times.size(); ++i)
    PyList_SetItem(list, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(static_cast<long long>(times[i])));
  return list;
}

// (program, address of [ProgramStep, inputs, StepRequests of groups, visible ends], first step, end step) -> None, or
// of a collective that failed (number of the step, its rows, status of the collective).
PyObject* program_run(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  StoredArguments in(call.in.pointer<const int64_t>());
  const int64_t begin = call.in.size(), end = call.in.size();
  if (!call.is_good()) return nullptr;
  ProgramStep step;
  in.read(step.output, step.workspace, step.index, step.failed, step.num_rows, step.num_tokens, step.num_threads,
          step.last.rows, step.last.positions, step.last.query_start, step.last.seq_lens, step.last.count);
  const void* inputs[kMaxInputs];
  const int64_t num_inputs = in.size();
  if (num_inputs > kMaxInputs) return PyErr_Format(PyExc_ValueError, "more than %d step inputs", kMaxInputs);
  for (int64_t input = 0; input < num_inputs; ++input) in.read(inputs[input]);
  StepRequests groups[kMaxGroups];
  const int64_t num_groups = in.size();
  if (num_groups > kMaxGroups) return PyErr_Format(PyExc_ValueError, "more than %d KV-cache groups", kMaxGroups);
  for (int64_t group = 0; group < num_groups; ++group) {
    in.read(groups[group].query_start, groups[group].seq_lens, groups[group].block_table,
            groups[group].block_table_stride, groups[group].num_requests);
  }
  in.read(step.visible_ends);
  step.inputs = inputs;
  step.groups = groups;
  if (begin == 0)
    for (const InputLimit& limit : call.program->limits)
      if (!are_rows(static_cast<const int32_t*>(inputs[limit.input]), step.num_rows, limit.num_rows)) return nullptr;
  ProgramOutcome outcome;
  Py_BEGIN_ALLOW_THREADS;
  outcome = run_program(*call.program, step, static_cast<size_t>(begin), static_cast<size_t>(end));
  Py_END_ALLOW_THREADS;
  if (!outcome.had_memory) return PyErr_NoMemory();
  if (outcome.collective_status != 0)
    return Py_BuildValue("LLL", static_cast<long long>(outcome.step), static_cast<long long>(outcome.num_rows),
                         static_cast<long long>(outcome.collective_status));
  Py_RETURN_NONE;
}

}  // namespace
