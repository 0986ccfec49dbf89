// The operations of the library. Each is described once (`operations.cpp`): its name, its operands and its arguments.
// The call from Python, the tracer and recorded programs all follow that description.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "collectives.h"
#include "quantized.h"

namespace penstock {

struct ProgramStep;

// kRows: every row is computed by itself, so that a program may take some rows through several operations before the
// next ones. kStep: the operation needs all rows of a step at once, as attention does.
enum class Scope : int { kRows = 0, kStep = 1 };

// How an operation uses rows of floats. kReadAny: they may be missing. kOverwrite: it leaves nothing of use in them.
enum class Use : int { kNone = 0, kRead, kReadAny, kChange, kOverwrite, kMake, kMakeAny };

// A step input that an operation reads, an element per row.
enum class InputType : int { kNone = 0, kInt32, kInt64 };

// A constant argument of an operation: a tensor's address, or a number.
enum class FieldType : int { kFloats = 0, kPacked, kTensor, kInt64, kInt32, kFloat, kQuantizedKernels };

struct Field {
  const char* name;
  FieldType type;
  size_t offset;  // within the operation's arguments
  int alignment;  // of a tensor, in bytes
};

// Rows of floats. stride: floats from one row to the next, which is their width where they are contiguous.
struct Rows {
  float* at;
  int64_t stride;
};

// kNotMet: the ranks did not come together; `status` says why.
struct Result {
  bool had_memory;
  int64_t status;

  bool is_good() const { return had_memory && status == 0; }
};

constexpr Result kDone{true, 0};

// The rows on which an operation is run: those of a whole step, or a part of them.
struct Call {
  const Kernels* kernels;
  Rows x, second, out;
  const void* input;  // from the first of these rows on
  int64_t* index;     // chosen tokens
  bool* failed;       // rows that have none
  int64_t first_row, num_rows;
  int num_threads;
  const ProgramStep* step;  // nullptr outside of programs
};

struct Operation;

constexpr int kMaxFields = 24;

struct OperationType {
  const char* name;
  Scope scope;
  Use x, second, out;
  InputType input;
  bool chooses;  // tokens, an index and whether it failed for every row
  Result (*run)(const Operation&, const Call&);
  Field fields[kMaxFields];  // up to one without a name
  // Of a lookup, the rows that its step input may name.
  int64_t (*num_known_rows)(const Operation&);
};

// An operation with its constant arguments, as the structure that its type's fields lie in.
struct Operation {
  const OperationType* type;
  alignas(8) unsigned char arguments[384];

  template <class Arguments>
  Arguments get() const {
    static_assert(sizeof(Arguments) <= sizeof(arguments), "the arguments of an operation have room");
    Arguments copy;
    std::memcpy(&copy, arguments, sizeof copy);
    return copy;
  }
};

// Rows of a table that a rank has, of `whole`; size is 0 where it has all. Rows that it does not have become zero.
struct TokenShare {
  int64_t start, size, whole;
};

// group: of the KV cache. is_last: only the last token of each request goes on, where a step asks for no others.
struct AttentionArguments {
  int64_t group;
  int is_last;
  AttentionArgs attention;
  Ranks ranks;
};

// The operation of this number; nullptr from the number of operations on.
const OperationType* operation_type(int64_t number);

}  // namespace penstock
