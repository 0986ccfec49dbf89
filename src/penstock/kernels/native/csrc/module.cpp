// The kernels as Python functions that take addresses and sizes as integers.
//
// Nothing here depends on torch, and only Python's stable interface is used: one build serves many versions of both.
// Arguments are not checked: the Python side of this package is the only caller.

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>

#include "kernels.h"
#include "parallel.h"
#include "program.h"
#include "quantized.h"
#include "step.h"

namespace {

using namespace penstock;

bool can_run(const Kernels* kernels) {
  if (kernels == nullptr) return false;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (kernels == avx512_kernels())
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (kernels == avx2_kernels())
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // these have F16C too
#endif
  return kernels == generic_kernels();
}

// Best first.
const Kernels* candidate(int index) {
  const Kernels* all[] = {avx512_kernels(), avx2_kernels(), generic_kernels()};
  return index < 3 && can_run(all[index]) ? all[index] : nullptr;
}

// The arguments of a call, one after the other.
class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t count) : values_(values), count_(count) {}

  template <class T>
  T* pointer() {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(size()));
  }
  int64_t size() { return next_ < count_ ? PyLong_AsLongLong(values_[next_++]) : missing(); }
  int integer() { return static_cast<int>(size()); }
  float real() { return next_ < count_ ? static_cast<float>(PyFloat_AsDouble(values_[next_++])) : missing(); }
  const Kernels* kernels() {
    const Kernels* chosen = candidate(integer());
    if (chosen == nullptr && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "this processor cannot run these kernels");
    return chosen;
  }
  bool has_more() const { return next_ < count_; }
  // Whether all arguments were there and of the right kind; if not, a Python error is set.
  bool are_good() {
    if (next_ != count_ && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "too many arguments");
    return PyErr_Occurred() == nullptr;
  }

 private:
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
  for (int i = 0; names != nullptr && i < 3; ++i) {
    if (candidate(i) == nullptr) continue;
    PyObject* entry = Py_BuildValue("(isi)", i, candidate(i)->name, candidate(i)->panel_width);
    if (entry == nullptr || PyList_Append(names, entry) != 0) Py_CLEAR(names);
    Py_XDECREF(entry);
  }
  return names;
}

PyObject* thread_library(PyObject*, PyObject*) { return Py_BuildValue("z", runtime_name()); }

PyObject* pack_weight(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  auto* weight = in.pointer<const void>();
  int64_t out_features = in.size(), in_features = in.size();
  auto type = static_cast<WeightType>(in.integer());
  auto* packed = in.pointer<void>();
  if (!in.are_good()) return nullptr;
  kernels->pack_weight(weight, out_features, in_features, type, packed);
  Py_RETURN_NONE;
}

PyObject* unpack_weight(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  auto* packed = in.pointer<const void>();
  int64_t out_features = in.size(), in_features = in.size();
  auto type = static_cast<WeightType>(in.integer());
  auto* weight = in.pointer<void>();
  if (!in.are_good()) return nullptr;
  kernels->unpack_weight(packed, out_features, in_features, type, weight);
  Py_RETURN_NONE;
}

PyObject* linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  LinearArgs a;
  a.x = in.pointer<const float>();
  a.x_stride = in.size();
  a.weight = in.pointer<const void>();
  a.bias = in.pointer<const float>();
  a.out = in.pointer<float>();
  a.out_stride = in.size();
  a.rows = in.size();
  a.in_features = in.size();
  a.out_features = in.size();
  a.weight_type = static_cast<WeightType>(in.integer());
  a.num_threads = in.integer();
  return in.are_good() ? run(kernels->linear, a) : nullptr;
}

PyObject* greedy(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  GreedyArgs a{};
  a.product.x = in.pointer<const float>();
  a.product.x_stride = in.size();
  a.product.weight = in.pointer<const void>();
  a.index = in.pointer<int64_t>();
  a.failed = in.pointer<bool>();
  a.product.rows = in.size();
  a.product.in_features = in.size();
  a.product.out_features = in.size();
  a.product.weight_type = static_cast<WeightType>(in.integer());
  a.product.num_threads = in.integer();
  return in.are_good() ? run(kernels->greedy, a) : nullptr;
}

PyObject* rows(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  RowsArgs a;
  a.weight = in.pointer<const void>();
  a.ids = in.pointer<const int32_t>();
  a.out = in.pointer<float>();
  a.num_ids = in.size();
  a.in_features = in.size();
  a.weight_type = static_cast<WeightType>(in.integer());
  a.num_threads = in.integer();
  return in.are_good() ? run(kernels->rows, a) : nullptr;
}

// Whether a table of so many rows has these; if not, a Python error is set.
bool are_rows(const int32_t* ids, int64_t count, int64_t num_rows) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= num_rows) {
      PyErr_Format(PyExc_IndexError, "row %d of a table of %lld rows", ids[i], static_cast<long long>(num_rows));
      return false;
    }
  return true;
}

PyObject* lookup(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  LookupArgs a;
  a.table = in.pointer<const void>();
  a.ids = in.pointer<const int32_t>();
  a.out = in.pointer<float>();
  a.num_ids = in.size();
  a.num_rows = in.size();
  a.width = in.size();
  a.weight_type = static_cast<WeightType>(in.integer());
  a.num_threads = in.integer();
  return in.are_good() && are_rows(a.ids, a.num_ids, a.num_rows) ? run(kernels->lookup, a) : nullptr;
}

PyObject* attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  AttentionArgs a;
  a.query = in.pointer<const float>();
  a.query_stride = in.size();
  a.key = in.pointer<const float>();
  a.key_stride = in.size();
  a.value = in.pointer<const float>();
  a.value_stride = in.size();
  a.key_cache = in.pointer<void>();
  a.value_cache = in.pointer<void>();
  a.head_stride = in.size();
  a.cache_type = static_cast<CacheType>(in.integer());
  a.query_start = in.pointer<const int32_t>();
  a.seq_lens = in.pointer<const int32_t>();
  a.block_table = in.pointer<const int32_t>();
  a.block_table_stride = in.size();
  a.num_requests = in.size();
  a.out = in.pointer<float>();
  a.out_stride = in.size();
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
  a.positions = in.pointer<const int64_t>();
  a.phase = static_cast<AttentionPhase>(in.integer());
  a.num_threads = in.integer();
  return in.are_good() ? run(kernels->attention, a) : nullptr;
}

PyObject* rms_norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  NormArgs a;
  a.x = in.pointer<float>();
  a.x_stride = in.size();
  a.residual = in.pointer<const float>();
  a.weight = in.pointer<const float>();
  a.weight_stride = in.size();
  a.out = in.pointer<float>();
  a.rows = in.size();
  a.heads = in.size();
  a.size = in.size();
  a.eps = in.real();
  a.num_threads = in.integer();
  return in.are_good() ? run(kernels->rms_norm, a) : nullptr;
}

PyObject* gate_and_mul(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  GateArgs a;
  a.activation = static_cast<Activation>(in.integer());
  a.x = in.pointer<const float>();
  a.out = in.pointer<float>();
  a.rows = in.size();
  a.size = in.size();
  a.num_threads = in.integer();
  return in.are_good() ? run(kernels->gate_and_mul, a) : nullptr;
}

PyObject* rotary(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  RotaryArgs a;
  a.heads = in.pointer<float>();
  a.token_stride = in.size();
  a.head_stride = in.size();
  a.positions = in.pointer<const int64_t>();
  a.table = in.pointer<const float>();
  a.num_tokens = in.size();
  a.num_heads = in.size();
  a.half = in.size();
  a.num_threads = in.integer();
  return in.are_good() ? run(kernels->rotary, a) : nullptr;
}

PyObject* argmax(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  ArgmaxArgs a;
  a.x = in.pointer<const float>();
  a.index = in.pointer<int64_t>();
  a.failed = in.pointer<bool>();
  a.rows = in.size();
  a.size = in.size();
  a.num_threads = in.integer();
  return in.are_good() ? run(kernels->argmax, a) : nullptr;
}

PyObject* draw(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const Kernels* kernels = in.kernels();
  DrawArgs a;
  a.x = in.pointer<const float>();
  a.seeds = in.pointer<const int64_t>();
  a.slots = in.pointer<const int64_t>();
  a.positions = in.pointer<const int64_t>();
  a.index = in.pointer<int64_t>();
  a.failed = in.pointer<bool>();
  a.rows = in.size();
  a.size = in.size();
  a.num_threads = in.integer();
  return in.are_good() ? run(kernels->draw, a) : nullptr;
}

}  // namespace

#include "module_stored.inl"
#include "module_quantized.inl"
#include "module_program.inl"
#include "module_step.inl"

namespace {

#define PENSTOCK_FUNCTION(name) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(name)), METH_FASTCALL, nullptr}

PyMethodDef kMethods[] = {
    {"instruction_sets", instruction_sets, METH_NOARGS, nullptr},
    {"thread_library", thread_library, METH_NOARGS, nullptr},
    PENSTOCK_FUNCTION(pack_weight),
    PENSTOCK_FUNCTION(unpack_weight),
    PENSTOCK_FUNCTION(linear),
    PENSTOCK_FUNCTION(greedy),
    PENSTOCK_FUNCTION(rows),
    PENSTOCK_FUNCTION(lookup),
    PENSTOCK_FUNCTION(attention),
    PENSTOCK_FUNCTION(rms_norm),
    PENSTOCK_FUNCTION(gate_and_mul),
    PENSTOCK_FUNCTION(rotary),
    PENSTOCK_FUNCTION(argmax),
    PENSTOCK_FUNCTION(draw),
    PENSTOCK_FUNCTION(gather_step),
    PENSTOCK_FUNCTION(step_outcome),
    PENSTOCK_FUNCTION(advance_state),
    {"quantized_instruction_sets", quantized_instruction_sets, METH_NOARGS, nullptr},
    PENSTOCK_FUNCTION(quantized_packed_bytes),
    PENSTOCK_FUNCTION(quantized_pack),
    PENSTOCK_FUNCTION(quantized_unpack),
    PENSTOCK_FUNCTION(quantized_linear),
    PENSTOCK_FUNCTION(quantized_rows),
    PENSTOCK_FUNCTION(program_new),
    PENSTOCK_FUNCTION(program_buffer),
    PENSTOCK_FUNCTION(program_add),
    PENSTOCK_FUNCTION(program_run),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_kernels", nullptr, 0, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&kModule); }
