// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lamina/plan/schedule.h"

namespace lamina::plan {

// A step of a chain of stages, one per rank, under a schedule, in simulated time: rank 0 starts the microbatches, each
// goes forward through the ranks, comes back to rank 0, and goes backward from the last rank to rank 0.
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

}  // namespace lamina::plan
