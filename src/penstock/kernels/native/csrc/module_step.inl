// Python bindings of a step's bookkeeping; part of module.cpp.

namespace {

DraftArgs read_drafts(StoredArguments& in) {
  DraftArgs drafts;
  in.read(drafts.token_ids, drafts.width, drafts.num_drafts, drafts.num_checked, drafts.first_rows, drafts.num_rows);
  return drafts;
}

// (address of [GatherArgs, number of groups, TableArgs of each])
PyObject* gather_step(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments given(values, count);
  StoredArguments in(given.pointer<const int64_t>());
  if (!given.are_good()) return nullptr;
  GatherArgs a;
  in.read(a.all_token_ids, a.width, a.num_computed, a.slots, a.num_scheduled, a.token_rows, a.token_offsets, a.num_rows,
          a.num_tokens, a.num_actual_tokens, a.input_ids, a.positions, a.seq_lens);
  a.drafts = read_drafts(in);
  in.read(a.total_len);
  gather_step(a);
  for (int64_t groups = in.size(); groups > 0; --groups) {
    TableArgs table;
    in.read(table.all_blocks, table.width, table.block_size, table.blocks, table.columns, table.stride,
            table.slot_mapping);
    gather_blocks(a, table);
  }
  Py_RETURN_NONE;
}

// Tokens of one request.
PyObject* token_list(const int64_t* tokens, int64_t count) {
  PyObject* list = PyList_New(count);
  for (int64_t j = 0; list != nullptr && j < count; ++j) {
    PyObject* token = PyLong_FromLongLong(tokens[j]);
    if (token == nullptr) {
      Py_CLEAR(list);
      break;
    }
    PyList_SetItem(list, j, token);
  }
  return list;
}

// Sampled tokens, a list per request.
PyObject* token_lists(const OutcomeArgs& a) {
  PyObject* lists = PyList_New(a.num_rows);
  const int64_t* out = a.outcome;
  for (int64_t r = 0; lists != nullptr && r < a.num_rows; ++r, out += a.columns + 3) {
    PyObject* list = token_list(out, out[a.columns]);
    if (list == nullptr) {
      Py_CLEAR(lists);
      break;
    }
    PyList_SetItem(lists, r, list);
  }
  return lists;
}

// Failure codes, one per request; None where all are zero.
PyObject* failure_list(const OutcomeArgs& a) {
  const int64_t *failures = a.outcome + a.columns + 2, width = a.columns + 3;
  bool any = false;
  for (int64_t r = 0; r < a.num_rows; ++r) any |= failures[r * width] != 0;
  if (!any) Py_RETURN_NONE;
  PyObject* list = PyList_New(a.num_rows);
  for (int64_t r = 0; list != nullptr && r < a.num_rows; ++r) {
    PyObject* failure = PyLong_FromLongLong(failures[r * width]);
    if (failure == nullptr) {
      Py_CLEAR(list);
      break;
    }
    PyList_SetItem(list, r, failure);
  }
  return list;
}

// (address of the leading fields of OutcomeArgs and its outcome, sampled, failures, failure_size)
// -> (token_lists, failure_list)
PyObject* step_outcome(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments given(values, count);
  StoredArguments in(given.pointer<const int64_t>());
  OutcomeArgs a;
  given.read(a.sampled, a.failures, a.failure_size);
  if (!given.are_good()) return nullptr;
  in.read(a.seq_lens, a.prefill_lens, a.slots, a.num_rows, a.columns, a.outcome);
  a.drafts = read_drafts(in);
  step_outcome(a);
  PyObject* tokens = token_lists(a);
  PyObject* failures = tokens != nullptr ? failure_list(a) : nullptr;
  PyObject* both = failures != nullptr ? PyTuple_New(2) : nullptr;
  if (both == nullptr) {
    Py_XDECREF(tokens);
    Py_XDECREF(failures);
    return nullptr;
  }
  PyTuple_SetItem(both, 0, tokens);
  PyTuple_SetItem(both, 1, failures);
  return both;
}

// (address of AdvanceArgs)
PyObject* advance_state(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments given(values, count);
  StoredArguments in(given.pointer<const int64_t>());
  if (!given.are_good()) return nullptr;
  AdvanceArgs a;
  in.read(a.all_token_ids, a.width, a.total_len, a.num_computed, a.slots, a.num_scheduled, a.num_rows, a.columns,
          a.outcome);
  advance_state(a);
  Py_RETURN_NONE;
}

}  // namespace
