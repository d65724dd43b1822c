// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>

namespace lamina::base {

using Clock = std::chrono::steady_clock;

// A point in time by which a wait must end.
class Deadline {
 public:
  static Deadline after(Clock::duration span) { return Deadline(Clock::now() + span); }

  bool expired() const { return Clock::now() >= at_; }
  Clock::time_point at() const { return at_; }

  // The earlier of this deadline and one `span` from now: the end of one slice of a long wait.
  Clock::time_point slice(Clock::duration span) const { return std::min(at_, Clock::now() + span); }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace lamina::base
