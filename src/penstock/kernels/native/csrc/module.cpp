// Python bindings of the kernels; addresses and sizes are passed as integers.
//
// Independent of torch, and limited to Python's stable ABI: one build serves many versions of both.
// Arguments are not validated: the Python side of this package is the only caller.

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>

#include "attention_of_ranks.h"
#include "experts.h"
#include "kernels.h"
#include "collectives.h"
#include "parallel.h"
#include "processor.h"
#include "program.h"
#include "quantized.h"
#include "recurrence.h"
#include "step.h"
#include "tile_choices.h"

namespace {

using namespace penstock;

// Sequence of numbers from Source, converted to the C++ types of the fields.
template <class Source>
class Fields {
 public:
  // Reads one value per field, in order.
  template <class... All>
  void read(All&... fields) {
    (take(fields), ...);
  }
  template <class T>
  T* pointer() {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(source().size()));
  }
  int integer() { return static_cast<int>(source().size()); }

 private:
  Source& source() { return static_cast<Source&>(*this); }
  template <class T>
  void take(T*& field) {
    field = pointer<T>();
  }
  void take(float& field) { field = source().real(); }
  template <class Integer>
  void take(Integer& field) {
    field = static_cast<Integer>(source().size());
  }
};

// Arguments of a call. A tensor is accepted in place of its address.
class Arguments : public Fields<Arguments> {
 public:
  Arguments(PyObject* const* values, Py_ssize_t count) : values_(values), count_(count) {}

  int64_t size() {
    if (next_ >= count_) return missing();
    PyObject* value = values_[next_++];
    return PyLong_Check(value) ? PyLong_AsLongLong(value) : address_of(value);
  }
  float real() { return next_ < count_ ? static_cast<float>(PyFloat_AsDouble(values_[next_++])) : missing(); }
  const Kernels* kernels() {
    const Kernels* chosen = candidate(integer());
    if (chosen == nullptr && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "this CPU does not support these kernels");
    return chosen;
  }
  bool has_more() const { return next_ < count_; }
  // Whether all arguments were present and of the right type; if not, a Python error is set.
  bool are_good() {
    if (next_ != count_ && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "too many arguments");
    return PyErr_Occurred() == nullptr;
  }

 private:
  // Data address of a tensor; 0 for None.
  static int64_t address_of(PyObject* tensor) {
    if (tensor == Py_None || PyErr_Occurred()) return 0;
    static PyObject* const name = PyUnicode_InternFromString("data_ptr");
    PyObject* address = PyObject_CallMethodObjArgs(tensor, name, nullptr);
    if (address == nullptr) return 0;
    const int64_t value = PyLong_AsLongLong(address);
    Py_DECREF(address);
    return value;
  }
  int missing() {
    PyErr_SetString(PyExc_TypeError, "too few arguments");
    return 0;
  }

  PyObject* const* values_;
  Py_ssize_t count_;
  Py_ssize_t next_ = 0;
};

template <class Args>
PyObject* run(void (*kernel)(const Args&), const Args& args) {
  Py_BEGIN_ALLOW_THREADS;
  kernel(args);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

template <class Args>
PyObject* run(bool (*kernel)(const Args&), const Args& args) {
  bool had_memory;
  Py_BEGIN_ALLOW_THREADS;
  had_memory = kernel(args);
  Py_END_ALLOW_THREADS;
  if (!had_memory) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

PyObject* instruction_sets(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (int i = 0; names != nullptr && i < kCandidates; ++i) {
    const Kernels* found = candidate(i);
    if (found == nullptr) continue;
    PyObject* entry = Py_BuildValue("(isiii)", i, found->name, found->panel_width, found->has_pair_products,
                                    found->has_tile_products);
    if (entry == nullptr || PyList_Append(names, entry) != 0) Py_CLEAR(names);
    Py_XDECREF(entry);
  }
  return names;
}

PyObject* has_fast_pairs(PyObject*, PyObject*) { return PyBool_FromLong(penstock::has_fast_pairs()); }

PyObject* why_no_tiles(PyObject*, PyObject*) { return Py_BuildValue("z", penstock::why_no_tiles()); }

PyObject* multiply_tiles_alike(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* first = in.kernels();
  const auto first_seed = static_cast<uint32_t>(in.size());
  const Kernels* second = in.kernels();
  const auto second_seed = static_cast<uint32_t>(in.size());
  return in.are_good() ? PyBool_FromLong(penstock::multiply_tiles_alike(first, first_seed, second, second_seed)) : nullptr;
}

PyObject* thread_library(PyObject*, PyObject*) { return Py_BuildValue("z", runtime_name()); }

PyObject* convert_weight(void (*Kernels::*convert)(const PackArgs&), PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  PackArgs a;
  in.read(a.from, a.to, a.out_features, a.in_features, a.weight_type, a.num_threads);
  return in.are_good() ? run(kernels->*convert, a) : nullptr;
}

PyObject* pack_weight(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return convert_weight(&Kernels::pack_weight, values, count);
}

PyObject* unpack_weight(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return convert_weight(&Kernels::unpack_weight, values, count);
}

// Whether all ids are valid rows of a table; if not, a Python error is set.
bool are_rows(const int32_t* ids, int64_t count, int64_t num_rows) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= num_rows) {
      PyErr_Format(PyExc_IndexError, "row %d of a table of %lld rows", ids[i], static_cast<long long>(num_rows));
      return false;
    }
  return true;
}

PyObject* rotary(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  RotaryArgs a;
  in.read(a.heads, a.token_stride, a.head_stride, a.positions, a.table, a.num_tokens, a.num_heads, a.half,
          a.num_threads);
  return in.are_good() ? run(kernels->rotary, a) : nullptr;
}

PyObject* draw(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  DrawArgs a;
  in.read(a.x, a.seeds, a.slots, a.positions, a.index, a.failed, a.rows, a.size, a.num_threads);
  return in.are_good() ? run(kernels->draw, a) : nullptr;
}

PyObject* allow_by_bits(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  AllowArgs a;
  in.read(a.x, a.rows, a.words, a.num_rows, a.size, a.num_words, a.num_threads);
  return in.are_good() ? run(kernels->allow_by_bits, a) : nullptr;
}

// (the fields of StreamChoices) -> those before.
PyObject* set_stream_choices(PyObject*, PyObject* const* values, Py_ssize_t count) {
  const StreamChoices before = stream_choices;
  Arguments in(values, count);
  const int64_t of_one_row = in.integer(), bytes_ahead = in.integer();
  if (!in.are_good()) return nullptr;
  stream_choices = {of_one_row, bytes_ahead};
  return Py_BuildValue("(LL)", static_cast<long long>(before.of_one_row), static_cast<long long>(before.bytes_ahead));
}

// (the fields of TileChoices, or nothing to leave them) -> their values by name.
PyObject* set_tile_choices(PyObject*, PyObject* const* values, Py_ssize_t count) {
  TileChoices c = tile_choices;
  if (count > 0) {
    Arguments in(values, count);
    in.read(c.depth, c.row_bytes, c.bytes_ahead, c.panels_at_once, c.products_per_turn, c.fewest_quantized_rows);
    if (!in.are_good()) return nullptr;
    tile_choices = c;
  }
  const auto number = [](int64_t value) { return static_cast<long long>(value); };
  return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L}", "depth", number(c.depth), "row_bytes", number(c.row_bytes),
                       "bytes_ahead", number(c.bytes_ahead), "panels_at_once", number(c.panels_at_once),
                       "products_per_turn", number(c.products_per_turn), "fewest_quantized_rows",
                       number(c.fewest_quantized_rows));
}

}  // namespace

#include "module_stored.inl"
#include "module_quantized.inl"
#include "module_collectives.inl"
#include "module_program.inl"
#include "module_attention.inl"
#include "module_step.inl"

namespace {

#define PENSTOCK_FUNCTION(name) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(name)), METH_FASTCALL, nullptr}

PyMethodDef kMethods[] = {
    {"instruction_sets", instruction_sets, METH_NOARGS, nullptr},
    {"has_fast_pairs", has_fast_pairs, METH_NOARGS, nullptr},
    {"why_no_tiles", why_no_tiles, METH_NOARGS, nullptr},
    PENSTOCK_FUNCTION(multiply_tiles_alike),
    PENSTOCK_FUNCTION(set_stream_choices),
    PENSTOCK_FUNCTION(set_tile_choices),
    {"thread_library", thread_library, METH_NOARGS, nullptr},
    PENSTOCK_FUNCTION(pack_weight),
    PENSTOCK_FUNCTION(unpack_weight),
    PENSTOCK_FUNCTION(attention),
    PENSTOCK_FUNCTION(rotary),
    PENSTOCK_FUNCTION(draw),
    PENSTOCK_FUNCTION(allow_by_bits),
    PENSTOCK_FUNCTION(gather_step),
    PENSTOCK_FUNCTION(step_outcome),
    PENSTOCK_FUNCTION(advance_state),
    {"quantized_instruction_sets", quantized_instruction_sets, METH_NOARGS, nullptr},
    PENSTOCK_FUNCTION(quantized_packed_bytes),
    PENSTOCK_FUNCTION(quantized_pack),
    PENSTOCK_FUNCTION(quantized_unpack),
    PENSTOCK_FUNCTION(quantized_round),
    {"operation_types", operation_types, METH_NOARGS, nullptr},
    PENSTOCK_FUNCTION(operation),
    PENSTOCK_FUNCTION(step_operation),
    {"operation_bytes", operation_bytes, METH_NOARGS, nullptr},
    PENSTOCK_FUNCTION(store_operation),
    PENSTOCK_FUNCTION(route),
    PENSTOCK_FUNCTION(program_new),
    PENSTOCK_FUNCTION(program_buffer),
    PENSTOCK_FUNCTION(program_add),
    PENSTOCK_FUNCTION(program_measure),
    PENSTOCK_FUNCTION(program_times),
    PENSTOCK_FUNCTION(program_run),
    PENSTOCK_FUNCTION(collective_bytes),
    PENSTOCK_FUNCTION(collective_calls),
    PENSTOCK_FUNCTION(run_collective),
    PENSTOCK_FUNCTION(channel_bytes),
    PENSTOCK_FUNCTION(channel_waits),
    PENSTOCK_FUNCTION(channel_send),
    PENSTOCK_FUNCTION(channel_receive),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_kernels", nullptr, 0, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels(void) {
  choose_streams();
  return PyModule_Create(&kModule);
}
