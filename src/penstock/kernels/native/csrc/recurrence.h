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

// Channels of this rank in the groups of a norm, of which a group has channels of several ranks.
struct SharedGroupArguments {
  int64_t size, group, num_groups, group_size;
  const float* weight;  // [size]
  float eps;
};

// Of the rows of a whole step; output rows of padding become zero. x: rows.
Result causal_convolution(const Operation& operation, const Call& call);
// x: mixed rows. second: gates.
Result linear_recurrence(const Operation& operation, const Call& call);
// x: rows. second: those of the gate.
Result gated_norm(const Operation& operation, const Call& call);
// x: rows of this rank's channels. out: a sum of squares for each group, zero for others than this rank's.
Result group_squares(const Operation& operation, const Call& call);
// x: rows of this rank's channels. second: the sums of squares of all ranks. out: RMS norm of the rows.
Result shared_group_norm(const Operation& operation, const Call& call);

}  // namespace penstock
