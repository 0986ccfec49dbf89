// Operations of recurrent layers over the states of a step's requests.
#pragma once

#include "operations.h"

namespace penstock {

// group: KV-cache group, whose requests a step has.
struct ConvolutionArguments {
  int64_t group;
  ConvolutionArgs convolution;
};

struct RecurrenceArguments {
  int64_t group;
  RecurrenceArgs recurrence;
};

// Of the rows of a whole step; output rows of padding become zero. x: rows.
Result causal_convolution(const Operation& operation, const Call& call);
// x: mixed rows. second: gates.
Result linear_recurrence(const Operation& operation, const Call& call);
// x: rows. second: those of the gate.
Result gated_norm(const Operation& operation, const Call& call);

}  // namespace penstock
