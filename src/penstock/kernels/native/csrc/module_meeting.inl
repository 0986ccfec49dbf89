// What ranks do together, as Python functions; part of module.cpp.

namespace {

PyObject* meeting_bytes(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  int64_t size, slot_bytes;
  in.read(size, slot_bytes);
  return in.are_good() ? PyLong_FromLongLong(penstock::meeting_bytes(size, slot_bytes)) : nullptr;
}

void read(Arguments& in, Ranks& ranks) {
  in.read(ranks.memory, ranks.rank, ranks.size, ranks.slot_bytes, ranks.timeout_us, ranks.spin_us);
}

PyObject* meeting_calls(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const void* memory;
  int64_t rank;
  in.read(memory, rank);
  return in.are_good() ? PyLong_FromLongLong(penstock::meeting_calls(memory, rank)) : nullptr;
}

PyObject* meet(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  MeetingArgs a;
  read(in, a.ranks);
  in.read(a.together, a.in, a.num_bytes, a.rows, a.out);
  if (!in.are_good()) return nullptr;
  int64_t status;
  Py_BEGIN_ALLOW_THREADS;
  status = penstock::meet(a);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLongLong(status);
}

PyObject* mail(int64_t (*run)(const MailArgs&), PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  MailArgs a;
  in.read(a.memory, a.data, a.num_bytes, a.timeout_us, a.spin_us);
  if (!in.are_good()) return nullptr;
  int64_t status;
  Py_BEGIN_ALLOW_THREADS;
  status = run(a);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLongLong(status);
}

PyObject* mail_waits(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count);
  const void* memory;
  in.read(memory);
  return in.are_good() ? PyLong_FromLongLong(penstock::mail_waits(memory)) : nullptr;
}

PyObject* mailbox_bytes(PyObject*, PyObject* const*, Py_ssize_t) { return PyLong_FromLongLong(penstock::mailbox_bytes()); }

PyObject* mail_send(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return mail(penstock::mail_send, values, count);
}

PyObject* mail_receive(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return mail(penstock::mail_receive, values, count);
}

}  // namespace
