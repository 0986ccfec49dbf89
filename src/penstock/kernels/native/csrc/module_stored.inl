// Arguments that stay the same from step to step come as the address of an array; part of module.cpp.
//
// A dozen integers in Python are a dozen objects, and after a forward pass none of them is in a cache.

namespace {

// Values that were written down once, as int64.
class StoredArguments : public Fields<StoredArguments> {
 public:
  explicit StoredArguments(const int64_t* values) : values_(values) {}

  int64_t size() { return *values_++; }

 private:
  const int64_t* values_;
};

}  // namespace
