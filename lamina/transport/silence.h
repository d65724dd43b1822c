// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/base/ids.h"

namespace lamina::transport {

// [Note: silence] The kernel closes what a process had open when it ends. It closes nothing while one stands still:
// stopped by a signal, on a machine that is suspended, or amid a dump of its memory. So ranks that are to outlive
// others give each connected one a sign of life, from the transport's thread, which neither computes nor needs Python's
// lock. Whatever else a rank is busy with, it gives them. A peer that gives none for the limit is told so, as the last
// word on that connection, and counts as lost. One that wakes later and finds this word ends itself at once.
//
// A process that has stood still has heard nobody meanwhile. So silence is the time in which this process looked: a gap
// between two of its looks counts as the time from a sign to the next one at most.
//
// It is a function of what it is told. Who calls: one thread. await_looks() is any other thread's.
class Silence {
 public:
  using Time = base::Clock::time_point;

  Silence(int size, base::Clock::duration limit, Time now);
  ~Silence();
  Silence(const Silence&) = delete;
  Silence& operator=(const Silence&) = delete;

  // Waits until each that there is in this process has taken what came before this call, for some tenths of a second:
  // where others count this process as lost, it has ended then. For what must not be done by such a one.
  static void await_looks();

  // Notes that what has come until now was read, before heard() of it. True where signs are to be given.
  bool look(Time now);
  // There is a connection, or something has come over it.
  void heard(base::Rank peer) { heard_[peer.value] = looked_; }
  // Nothing has come for the limit.
  bool is_silent(base::Rank peer) const { return looked_ - heard_[peer.value] >= limit_; }
  // This process has stood still a moment ago for half the limit, so that others may take it for lost.
  bool has_stood_still() const { return stood_still_; }

 private:
  const base::Clock::duration limit_, each_;
  Time last_, next_sign_;
  base::Clock::duration looked_{};  // how long this process has looked
  std::vector<base::Clock::duration> heard_;
  Time awake_;  // since when it looks again
  bool stood_still_ = false;
  std::atomic<std::int64_t> looks_ = 0;
};

}  // namespace lamina::transport
