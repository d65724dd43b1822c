// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lamina/plan/schedule.h"

namespace lamina::plan {

// A step of a chain of stages, one per rank, under a schedule, in simulated time. Rank 0 starts the microbatches and
// calls all stages of each at once; what they return goes straight from each rank to the next, from the last one to
// rank 0, which has the loss, and backward from the last rank down to rank 0.
struct Chain {
  int stages = 1;
  int microbatches = 1;
  std::int64_t forward = 1;  // time a stage computes
  std::int64_t backward = 1;
  std::function<std::int64_t()> delay = [] { return 0; };  // of each message
};

// A rank let a ticket go on. On rank 0, kStart computes the first stage's forward, and kForward and kBackwardStart
// nothing.
struct Turn {
  std::int64_t start = 0;
  std::int64_t end = 0;
  int rank = 0;
  Ticket ticket;
  Progress after;  // of the leading rank, when the turn had ended
};

// The turns in the order in which they ended. Fewer than 2 * stages + 2 per microbatch mean a deadlock.
std::vector<Turn> simulate(const Schedule& schedule, const Chain& chain);

// The time at which the step ends.
std::int64_t step_time(const Schedule& schedule, const Chain& chain);

}  // namespace lamina::plan
