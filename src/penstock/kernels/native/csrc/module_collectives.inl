// Python bindings of collectives and point-to-point channels; part of module.cpp.

namespace {

PyObject* collective_bytes(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  int64_t size, slot_bytes;
  in.read(size, slot_bytes);
  return in.are_good() ? PyLong_FromLongLong(penstock::collective_bytes(size, slot_bytes)) : nullptr;
}

void read(Arguments& in, Ranks& ranks) {
  in.read(ranks.memory, ranks.rank, ranks.size, ranks.slot_bytes, ranks.timeout_us, ranks.spin_us);
}

PyObject* collective_calls(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const void* memory;
  int64_t rank;
  in.read(memory, rank);
  return in.are_good() ? PyLong_FromLongLong(penstock::collective_calls(memory, rank)) : nullptr;
}

PyObject* run_collective(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  CollectiveArgs a;
  read(in, a.ranks);
  in.read(a.kind, a.in, a.num_bytes, a.rows, a.out);
  if (!in.are_good()) return nullptr;
  int64_t status;
  Py_BEGIN_ALLOW_THREADS;
  status = penstock::run_collective(a);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLongLong(status);
}

PyObject* point_to_point(int64_t (*run)(const ChannelArgs&), PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  ChannelArgs a;
  in.read(a.memory, a.data, a.num_bytes, a.timeout_us, a.spin_us);
  if (!in.are_good()) return nullptr;
  int64_t status;
  Py_BEGIN_ALLOW_THREADS;
  status = run(a);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLongLong(status);
}

PyObject* channel_waits(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const void* memory;
  in.read(memory);
  return in.are_good() ? PyLong_FromLongLong(penstock::channel_waits(memory)) : nullptr;
}

PyObject* channel_bytes(PyObject*, PyObject* const*, Py_ssize_t) { return PyLong_FromLongLong(penstock::channel_bytes()); }

PyObject* channel_send(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return point_to_point(penstock::channel_send, values, count);
}

PyObject* channel_receive(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return point_to_point(penstock::channel_receive, values, count);
}

}  // namespace
