// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "lamina/plan/goal.h"

namespace lamina::plan {

// What a rank does for a microbatch, and how much of its work is done elsewhere before it comes here, forward, and
// after it has left, backward.
struct RankTime {
  double forward_us = 0;
  double backward_us = 0;
  double before_us = 0;

  double load_us() const { return forward_us + backward_us; }
};

// Each work of a rank, forward and backward, times the work before its middle: the sum tells where the rank has its
// work.
inline double moment(double work_us, double before_us) { return work_us * (before_us + work_us / 2); }

// What is before a rank that has all its work in one place; of others a mean, so that a little work early or late does
// not count as much as the rest. `whole_us` is the work of all ranks.
inline double before(double load_us, double moment, double whole_us) {
  if (load_us <= 0) return 0;
  return std::clamp(moment / load_us - load_us / 2, 0.0, std::max(0.0, whole_us - load_us));
}

// [Note: predicted step] A rank waits for the first microbatch to come to it, then does its part of each, and the last
// one goes back the way the first one came. While a microbatch is elsewhere in between, the rank works on others, but
// not all the time: half of that is taken to be lost. So the leading rank, for which nothing comes before, may do more
// than the others, and the last of a chain, from which everything goes back, loses nothing in between. The step takes
// as long as the rank that takes longest, and the messages of one microbatch.
//
// With fewer microbatches in flight than there are, one begins only when an earlier one has ended: as many whole paths
// follow each other. `simple` does forwards and backwards apart: in each, one microbatch takes the whole path, and
// after it one ends whenever the heaviest rank has done its part. schedule/simulation.h runs the schedule itself;
// tests/plan compares the two.
class StepTime {
 public:
  // All work of a microbatch, and the messages of its forward; those of its backward take as long.
  StepTime(const Goal& goal, double forward_us, double backward_us, double messages_us)
      : microbatches_(goal.microbatches),
        simple_(goal.simple()),
        path_forward_us_(forward_us + messages_us),
        path_backward_us_(backward_us + messages_us),
        idle_us_(2 * messages_us + kLost * (forward_us + backward_us)) {
    const int window = std::max(goal.window(), 1);
    const int rounds = (goal.microbatches + window - 1) / window;
    forward_us_ = rounds * path_forward_us_;
    backward_us_ = (simple_ ? 1 : rounds) * path_backward_us_;
  }

  // The interleaved step, if no rank takes longer than this one.
  double of(const RankTime& rank) const {
    return idle_us_ + (1 - kLost) * rank.before_us + (microbatches_ - kLost) * rank.load_us();
  }

  void add(const RankTime& rank) {
    if (simple_) {
      forward_us_ = std::max(forward_us_, path_forward_us_ + (microbatches_ - 1) * rank.forward_us);
      backward_us_ = std::max(backward_us_, path_backward_us_ + (microbatches_ - 1) * rank.backward_us);
    } else {
      longest_us_ = std::max(longest_us_, of(rank));
    }
  }

  // With the ranks that were added.
  double us() const { return std::max(forward_us_ + backward_us_, longest_us_); }

 private:
  static constexpr double kLost = 0.5;  // of the time that a microbatch is elsewhere in between

  int microbatches_;
  bool simple_;
  double path_forward_us_;  // all work and messages, one after the other
  double path_backward_us_;
  double idle_us_;  // a rank that has nothing to do, and to which microbatches come at once
  double forward_us_;
  double backward_us_;
  double longest_us_ = 0;
};

}  // namespace lamina::plan
