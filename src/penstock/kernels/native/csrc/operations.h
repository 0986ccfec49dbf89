// Operations of the library. Each is described once (`operations.cpp`): name, operands and arguments. The call from
// Python, the tracer and recorded programs all follow that description.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "collectives.h"
#include "quantized.h"

namespace penstock {

struct ProgramStep;

// kRows: every row is independent, so that a program may take some rows through several operations before the next
// rows. kStep: the operation needs all rows of a step at once, as attention does.
enum class Scope : int { kRows = 0, kStep = 1 };

// How an operation uses rows of floats. kReadAny, kMakeAny: optional. kOverwrite: their contents are undefined
// afterwards.
enum class Use : int { kNone = 0, kRead, kReadAny, kChange, kOverwrite, kMake, kMakeAny };

// Type of the step input that an operation reads, one element per row.
enum class InputType : int { kNone = 0, kInt32, kInt64 };

// A constant argument of an operation: a tensor's address, or a number.
enum class FieldType : int { kFloats = 0, kPacked, kTensor, kInt64, kInt32, kFloat, kQuantizedKernels };

struct Field {
  const char* name;
  FieldType type;
  size_t offset;  // within the operation's arguments
  int alignment;  // of a tensor, in bytes
};

// Rows of floats. stride: floats between rows; equals the width where rows are contiguous.
struct Rows {
  float* at;
  int64_t stride;
};

// status: of the collective that failed; 0 for none.
struct Result {
  bool had_memory;
  int64_t status;

  bool is_good() const { return had_memory && status == 0; }
};

constexpr Result kDone{true, 0};

// The rows on which an operation runs: those of a whole step, or a part of them.
struct Call {
  const Kernels* kernels;
  Rows x, second, out;
  const void* input;  // from the first of these rows on
  int64_t* index;     // chosen tokens
  bool* failed;       // rows without a valid token
  int64_t first_row, num_rows;
  int num_threads;
  const ProgramStep* step;  // nullptr outside of programs
};

struct Operation;

constexpr int kMaxFields = 32;

struct OperationType {
  const char* name;
  Scope scope;
  Use x, second, out;
  InputType input;
  bool chooses;  // whether it produces an index and a failed flag for every row
  Result (*run)(const Operation&, const Call&);
  Field fields[kMaxFields];  // terminated by one without a name
  // Number of table rows valid as step input; lookups only.
  int64_t (*num_known_rows)(const Operation&);
};

// An operation with its constant arguments, stored as the structure that its type's fields describe.
struct Operation {
  const OperationType* type;
  alignas(8) unsigned char arguments[440];

  template <class Arguments>
  Arguments get() const {
    static_assert(sizeof(Arguments) <= sizeof(arguments), "the arguments of an operation have room");
    Arguments copy;
    std::memcpy(&copy, arguments, sizeof copy);
    return copy;
  }
};

// This rank's rows of a table of `whole` rows; size is 0 where it has all. Lookups of other ranks' rows give zeros.
struct TokenShare {
  int64_t start, size, whole;
};

// group: KV-cache group. is_last: for a step that asks for last tokens alone, only these continue.
struct AttentionArguments {
  int64_t group;
  int is_last;
  AttentionArgs attention;
  Ranks ranks;
};

// Operation type by number; nullptr past the last one.
const OperationType* operation_type(int64_t number);

}  // namespace penstock
