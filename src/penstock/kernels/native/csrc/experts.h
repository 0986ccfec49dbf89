// Mixtures of experts: routing of rows to experts, and the products of each expert over its rows.
#pragma once

#include <cstdint>

#include "operations.h"

namespace penstock {

enum class Scoring : int { kSoftmax = 0, kSigmoid = 1, kSparseMixer = 2 };

// Rule by which a row's experts and their weights follow from the router's logits, as `Routing` of the layers.
struct RoutingRule {
  const float* bias;  // [num_experts], added to the scores for the choice alone; nullptr for none
  int64_t num_experts, top_k;
  Scoring scoring;
  int normalizes;
  float scale;
  int64_t num_groups, top_groups, best_of_group;
  float least_sum, jitter;
};

// experts, weights: [rows][top_k], experts rising. On ties the first expert wins; NaN loses.
struct RouteArgs {
  RoutingRule rule;
  const float* logits;  // rows of num_experts
  int64_t stride, rows;
  int32_t* experts;
  float* weights;
  int num_threads;
};

void route(const RouteArgs&);

// Operations of a gated MLP, each over the rows of the one before.
struct ExpertOperations {
  Operation gate_up, activation, down;
};

// experts: [num_experts]. gate_up_size, inner_size: row sizes of the results of the first two operations.
// load: [num_experts], to which each step adds the number of rows of each expert; nullptr where these are not counted.
struct ExpertsArguments {
  RoutingRule rule;
  const ExpertOperations* experts;
  int64_t gate_up_size, inner_size;
  int64_t* load;
};

// Weighted sum of each row's experts, added in the order of their numbers, so that it does not depend on other rows.
// x: rows. second: their logits. Output rows of padding become zero.
Result experts(const Operation& operation, const Call& call);

}  // namespace penstock
