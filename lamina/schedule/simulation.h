// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lamina/schedule/schedule.h"

namespace lamina::schedule {

// A microbatch computes on a rank, then goes to the next visit: its forward in this order, its backward back.
struct Visit {
  int rank = 0;
  std::int64_t forward = 1;  // time it computes
  std::int64_t backward = 1;
  std::int64_t message = 0;    // time between its end and the next visit of another rank; after the last, to rank 0
  bool backward_only = false;  // a forward does not come here: what would be handed on goes straight to the next visit
};

// A step in simulated time. Rank 0 starts the microbatches and calls all modules of each at once. The outputs go
// straight from each visit to the next, and from the last one to rank 0, which has the loss. Gradients go back the same
// way. A last visit of rank 0, the loss, and the beginning of the backward there, are one piece: the step body goes on.
struct Chain {
  std::vector<Visit> visits;  // the first is on rank 0
  int microbatches = 1;
  std::function<std::int64_t()> delay = [] { return 0; };  // of each message, beside its own time
};

// As many visits as stages, one on each rank, all alike.
Chain even_chain(int stages, int microbatches, std::int64_t forward = 1, std::int64_t backward = 1);

// A rank let a ticket go on. On rank 0, kStart computes the first visit's forward, and what goes on after the last one,
// kForward and kBackwardStart, computes nothing.
struct Turn {
  std::int64_t start = 0;
  std::int64_t end = 0;
  int rank = 0;
  int visit = 0;  // its position; as many as there are visits: the step body after the last one
  Ticket ticket;
  struct {
    int started = 0;
    int forward_done = 0;
    int finished = 0;
  } after;  // the leading rank's Progress when the turn had ended
};

// The turns in the order in which they ended. Fewer than 2 * visits + 2 per microbatch mean a deadlock.
std::vector<Turn> simulate(const Schedule& schedule, const Chain& chain);

// The time at which the step ends.
std::int64_t step_time(const Schedule& schedule, const Chain& chain);

}  // namespace lamina::schedule
