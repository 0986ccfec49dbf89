// Several steps of a program that takes tokens to tokens, in one call; part of module.cpp.

namespace {

// Seconds since some moment.
double seconds_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Steps, each from the tokens of the one before. Those before the last are recorded in the state.
class StepsAtOnce {
 public:
  StepsAtOnce(const Program& program, ProgramStep step, StoredArguments gather, OutcomeArgs outcome,
              StoredArguments advance)
      : program_(program), step_(step), gather_(gather), outcome_(outcome), advance_(advance) {
    outcome_.sampled = step_.index;
    outcome_.failures = step_.failed;
    outcome_.failure_size = sizeof *step_.failed;
  }

  // Until one has failed for a request, or another would take longer than is left of the time; at least one. False
  // without memory to work in. earlier: [steps before the last][rows], with room for max_steps - 1.
  bool run(int64_t max_steps, double seconds, int64_t* earlier, int64_t& num_earlier) const {
    const double begin = seconds_now();
    double step_begin = begin;
    for (num_earlier = 0;; ++num_earlier) {
      if (!run_program(program_, step_)) return false;
      const double now = seconds_now();
      if (num_earlier + 1 == max_steps || now + (now - step_begin) > begin + seconds || has_failed()) return true;
      step_begin = now;
      step_outcome(outcome_);
      for (int64_t row = 0; row < outcome_.num_rows; ++row)
        earlier[num_earlier * outcome_.num_rows + row] = outcome_.outcome[row];
      advance_stored(advance_);
      gather_stored(gather_);
    }
  }

 private:
  bool has_failed() const {
    for (int64_t row = 0; row < outcome_.num_rows; ++row)
      if (step_.failed[row] || step_.index[row] >= program_.num_ids) return true;
    return false;
  }

  const Program& program_;
  const ProgramStep step_;
  const StoredArguments gather_;
  OutcomeArgs outcome_;
  const StoredArguments advance_;
};

// A list per request of its tokens, one of each step.
PyObject* lists_by_row(const int64_t* tokens, int64_t num_steps, int64_t num_rows) {
  PyObject* lists = PyList_New(num_rows);
  for (int64_t row = 0; lists != nullptr && row < num_rows; ++row) {
    PyObject* list = PyList_New(num_steps);
    if (list == nullptr) {
      Py_CLEAR(lists);
      break;
    }
    PyList_SetItem(lists, row, list);
    for (int64_t step = 0; step < num_steps; ++step) {
      PyObject* token = PyLong_FromLongLong(tokens[step * num_rows + row]);
      if (token == nullptr) {
        Py_CLEAR(lists);
        break;
      }
      PyList_SetItem(list, step, token);
    }
  }
  return lists;
}

// (program, addresses for ProgramRun, gather_stored, outcome_stored and advance_stored, max_steps, microseconds)
// -> each request's tokens of the steps before the last; None where there was one only
PyObject* program_run_steps(PyObject*, PyObject* const* values, Py_ssize_t count) {
  ProgramCall call(values, count);
  StoredArguments in(call.in.pointer<const int64_t>());
  const StoredArguments gather(call.in.pointer<const int64_t>());
  const StoredArguments outcome(call.in.pointer<const int64_t>());
  const StoredArguments advance(call.in.pointer<const int64_t>());
  const int64_t max_steps = call.in.size();
  const double seconds = 1e-6 * call.in.size();
  ProgramRun run;
  if (!call.in.are_good() || call.program == nullptr || !run.read(*call.program, in)) return nullptr;
  const OutcomeArgs outcome_args = outcome_stored(outcome);
  auto* earlier = new (std::nothrow) int64_t[(max_steps - 1) * outcome_args.num_rows];
  if (earlier == nullptr) return PyErr_NoMemory();
  const StepsAtOnce steps(*call.program, run.step, gather, outcome_args, advance);
  int64_t num_earlier;
  bool had_memory;
  Py_BEGIN_ALLOW_THREADS;
  had_memory = steps.run(max_steps, seconds, earlier, num_earlier);
  Py_END_ALLOW_THREADS;
  PyObject* result = nullptr;
  if (!had_memory)
    PyErr_NoMemory();
  else if (num_earlier > 0)
    result = lists_by_row(earlier, num_earlier, outcome_args.num_rows);
  else
    result = Py_NewRef(Py_None);
  delete[] earlier;
  return result;
}

}  // namespace
