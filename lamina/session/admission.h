// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "lamina/base/deadline.h"

namespace lamina::session {

// One of those who wait at the door.
struct Entrant {
  int node = 0;      // its machine
  int together = 0;  // how many its launcher has begun with it by hand; 0: it comes back
  base::Clock::time_point came = {};
};

// Decides when newcomers may enter. Each time costs all ranks a change. So those who are started by hand enter
// together, and not again for a while. One that comes back does so at once, and whoever waits goes with it. A function
// of what it is told.
class Admission {
 public:
  using Time = base::Clock::time_point;
  static constexpr std::chrono::seconds kGathers{10};  // for the others of a launcher, whose imports take longer

  // Sets how often those who are started by hand enter, at most.
  void set_every(base::Clock::duration every) { every_ = every; }
  bool may_enter(const std::vector<Entrant>& waiting, Time now) const;
  void entered(const std::vector<Entrant>& these, Time now);

 private:
  base::Clock::duration every_{};
  std::optional<Time> last_;  // some by hand
};

}  // namespace lamina::session
