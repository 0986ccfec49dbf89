// Arguments that stay the same from step to step come as the address of an array; part of module.cpp.
//
// A dozen integers in Python are a dozen objects, and after a forward pass none of them is in a cache.

namespace {

// Values that were written down once, as int64.
class StoredArguments {
 public:
  explicit StoredArguments(const int64_t* values) : values_(values) {}

  template <class T>
  T* pointer() {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(size()));
  }
  int64_t size() { return *values_++; }
  int integer() { return static_cast<int>(size()); }

 private:
  const int64_t* values_;
};

}  // namespace
