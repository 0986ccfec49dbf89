// What ranks do together, as Python functions; part of module.cpp.

namespace {

PyObject* meeting_bytes(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  int64_t size, slot_bytes;
  in.read(size, slot_bytes);
  return in.are_good() ? PyLong_FromLongLong(penstock::meeting_bytes(size, slot_bytes)) : nullptr;
}

PyObject* meet(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  MeetingArgs a;
  in.read(a.memory, a.rank, a.size, a.slot_bytes, a.together, a.in, a.num_bytes, a.rows, a.out, a.timeout_us,
          a.spin_us);
  if (!in.are_good()) return nullptr;
  int64_t status;
  Py_BEGIN_ALLOW_THREADS;
  status = penstock::meet(a);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLongLong(status);
}

}  // namespace
