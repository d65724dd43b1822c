// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lamina/plan/goal.h"
#include "lamina/plan/module_tree.h"
#include "lamina/plan/route.h"
#include "lamina/plan/workload.h"

namespace lamina::plan {

// Sums of a step, per microbatch: the longest way through work and messages, and the heaviest rank's work.
struct StepShape {
  double path_forward_us = 0;
  double path_backward_us = 0;
  double heaviest_forward_us = 0;  // of the rank with most forward, and so on
  double heaviest_backward_us = 0;
  double heaviest_us = 0;
};

// [Note: predicted step] The first microbatch takes the whole path, and after it one ends whenever the heaviest rank
// has done its part. With fewer in flight than there are, one begins only when an earlier one has ended: as many whole
// paths follow each other. `simple` does this for forwards and for backwards apart. schedule/simulation.h runs the
// schedule itself; tests/plan compares the two.
double step_us(const StepShape& shape, const Goal& goal);

struct Prediction {
  std::vector<RankLoad> ranks;
  StepShape shape;
};

Prediction predict(const Route& route, const Assignment& owners, const Goal& goal);

// Runs that step by the schedule itself in simulated time, to a nanosecond: two windows of many microbatches. After
// them each is taken to add what the heaviest rank does for it, or a window's part of its path where that is more.
double simulated_step_us(const Route& route, const Assignment& owners, const Goal& goal);

// The mean of such steps in which turns take up to 5 per cent more or less than they should, by chance. So a plan gains
// nothing by turns that happen to meet. The work is made for that goal.
double mean_step_us(const PlannedWork& work, const Goal& goal);

// A lower bound of it, but for that chance.
double least_step_us(const PlannedWork& work, const Goal& goal);

// The turns that a mean step simulates of a microbatch of so many pieces.
std::int64_t simulated_turns(std::size_t pieces, const Goal& goal);

// The number of microbatches whose activations each partition holds at once in that simulated time, messages taking a
// moment. In a job there may be up to `goal.held()`.
std::vector<int> simulated_held(const Route& route, const Assignment& owners, const Goal& goal);

// Parameters, their gradients, and the activations of as many microbatches as are held.
inline std::int64_t held_bytes(std::int64_t parameter_bytes, std::int64_t activation_bytes, int held) {
  return 2 * parameter_bytes + held * activation_bytes;
}

// Counts per partition; with a goal, of as many microbatches as it may hold whatever the times.
std::vector<std::int64_t> memory_bytes(const ModuleTree& tree, const Assignment& owners, const std::vector<int>& held);
std::vector<std::int64_t> memory_bytes(const ModuleTree& tree, const Assignment& owners, const Goal& goal);

}  // namespace lamina::plan
