// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lamina/schedule/schedule.h"
#include "lamina/schedule/workload.h"

namespace lamina::schedule {

// A rank let a ticket go on. On rank 0, kStart computes the first piece's forward, and kBackwardStart the backward of
// the last one, the loss.
struct Turn {
  std::int64_t start = 0;
  std::int64_t end = 0;
  int rank = 0;
  int visit = 0;  // the position of its piece; of a chain, that of the visit, or as many as there are: the loss
  Ticket ticket;
  bool split = false;  // the microbatch's backward is, and the piece has a weight part
  struct {
    int started = 0;
    int forward_done = 0;
    int finished = 0;
  } after;  // the leading rank's Progress when the turn had ended

  bool frees() const { return about(kind_of(ticket.phase)).frees(split); }  // what the visit's forward has kept
};

// A step in simulated time: the turns in the order in which they ended. Fewer than two for each piece of each
// microbatch (one where it is for backwards only), and as many more as there are weight parts, mean a deadlock.
std::vector<Turn> simulate(const Schedule& schedule, const Workload& workload);
std::vector<Turn> simulate(const Schedule& schedule, const Chain& chain);

// The time at which the step ends.
std::int64_t step_time(const Schedule& schedule, const Workload& workload);
std::int64_t step_time(const Schedule& schedule, const Chain& chain);

}  // namespace lamina::schedule
