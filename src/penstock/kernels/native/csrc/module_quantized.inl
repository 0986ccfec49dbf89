// Python bindings of the quantised kernels; part of module.cpp.

namespace {

// Best first, then those for tests, which are not in the list of instruction sets.
constexpr int kQuantizedCandidates = 5;
const QuantizedKernels* quantized_candidate(int index) {
  const struct {
    const QuantizedKernels* kernels;
    const Kernels* needed;
  } all[] = {{quantized_amx_kernels(), amx_kernels()},       {quantized_avx512vnni_kernels(), avx512_kernels()},
             {quantized_avx512_kernels(), avx512_kernels()}, {quantized_avx2_kernels(), avx2_kernels()},
             {quantized_generic_kernels(), generic_kernels()}, {quantized_avx2_tiles_kernels(), avx2_kernels()}};
  if (index < 0 || index > kQuantizedCandidates || !can_run(all[index].needed)) return nullptr;
#if defined(__x86_64__)
  if (index <= 1 && !__builtin_cpu_supports("avx512vnni")) return nullptr;
#endif
  return all[index].kernels;
}

const QuantizedKernels* quantized_kernels(Arguments& in) {
  const QuantizedKernels* chosen = quantized_candidate(in.integer());
  if (chosen == nullptr && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "this CPU does not support these kernels");
  return chosen;
}

QuantizedShape quantized_shape(Arguments& in) {
  QuantizedShape shape;
  in.read(shape.bits, shape.out_features, shape.in_features, shape.group_size, shape.has_minimums, shape.scale_bytes);
  return shape;
}

PyObject* quantized_instruction_sets(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (int i = 0; names != nullptr && i < kQuantizedCandidates; ++i) {
    if (quantized_candidate(i) == nullptr) continue;
    PyObject* entry = Py_BuildValue("(is)", i, quantized_candidate(i)->name);
    if (entry == nullptr || PyList_Append(names, entry) != 0) Py_CLEAR(names);
    Py_XDECREF(entry);
  }
  return names;
}

PyObject* quantized_packed_bytes(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const QuantizedKernels* kernels = quantized_kernels(in);
  const QuantizedShape shape = quantized_shape(in);
  return in.are_good() ? PyLong_FromLongLong(kernels->packed_bytes(shape)) : nullptr;
}

PyObject* quantized_convert(void (*QuantizedKernels::*convert)(const QuantizedPackArgs&), PyObject* const* values,
                            Py_ssize_t count) {
  Arguments in(values, count);
  const QuantizedKernels* kernels = quantized_kernels(in);
  QuantizedPackArgs a;
  a.shape = quantized_shape(in);
  in.read(a.values, a.scales, a.minimums, a.packed, a.num_threads);
  return in.are_good() ? run(kernels->*convert, a) : nullptr;
}

PyObject* quantized_pack(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return quantized_convert(&QuantizedKernels::pack, values, count);
}

PyObject* quantized_unpack(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return quantized_convert(&QuantizedKernels::unpack, values, count);
}

// -> whether all scales and minimums are finite in float16; if not, the packed weight is undefined.
PyObject* quantized_round(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const QuantizedKernels* kernels = quantized_kernels(in);
  QuantizedRoundArgs a;
  a.shape = quantized_shape(in);
  in.read(a.weight, a.weight_stride, a.weight_type, a.packed, a.rest, a.num_threads);
  if (!in.are_good()) return nullptr;
  bool is_finite;
  Py_BEGIN_ALLOW_THREADS;
  is_finite = kernels->round(a);
  Py_END_ALLOW_THREADS;
  return PyBool_FromLong(is_finite);
}

}  // namespace
