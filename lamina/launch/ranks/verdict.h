// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/launch/ranks/rank_end.h"

namespace lamina::launch {

// Finds the rank that failed first, given the ends in the order in which they were noticed. [Note: first failure]
// Peers of a dead rank end by themselves within milliseconds, with errors of their own, and may be noticed in the same
// wake-up or even before it. So for a short while after the first failure a rank that was killed by a signal goes
// before one that exited. SIGABRT and SIGPIPE count as exits: they are how C++ programs end on a lost peer. A rank that
// says itself that another one is the reason (environment::Progress::kConsequence) gives way to any that does not. And
// where one has failed, a rank that left in the middle of a step, with exit code 0, is the reason.
class Verdict {
 public:
  struct Failure {
    base::Rank rank;
    RankEnd end;
  };

  void add(base::Rank rank, RankEnd end);

  // From now on ends are consequences: the ranks were told to end, or the peers had time to notice.
  void close() { closed_ = true; }

  const std::optional<Failure>& first() const { return first_; }
  // Who had ended with exit code 0, where the first failure says that another rank is its reason; else those of them
  // whose session was not over.
  std::vector<base::Rank> left() const;
  bool certain() const;                   // no later end could take the first place
  int others() const { return others_; }  // ranks that ended because of the first failure

 private:
  void blame_who_left();

  std::optional<Failure> first_;
  std::vector<Failure> succeeded_;
  int others_ = 0;
  bool closed_ = false;
};

}  // namespace lamina::launch
