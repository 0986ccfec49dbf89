// Arguments that are constant from step to step, passed as the address of an array; part of module.cpp.
//
// A dozen Python integers are a dozen objects, none of them in a cache after a forward pass.

namespace {

// Stored argument values, as int64.
class StoredArguments : public Fields<StoredArguments> {
 public:
  explicit StoredArguments(const int64_t* values) : values_(values) {}

  int64_t size() { return *values_++; }

 private:
  const int64_t* values_;
};

}  // namespace
