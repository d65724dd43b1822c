// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"

namespace lamina::launch {

// How a rank ended.
struct RankEnd {
  int code = 0;                // its exit code, if signal is 0
  int signal = 0;              // the signal that killed it
  bool out_of_memory = false;  // by the kernel, as it seems, for lack of memory
  bool consequence = false;    // it said that it ends because of another rank

  // With exit code 0, where the others still count on it.
  enum class Left { kInOrder, kInSession, kInStep };
  Left left = Left::kInOrder;
  std::int64_t step = -1;  // the last that it was in, if it did not leave in order

  bool failed() const { return code != 0 || signal != 0; }
  int exit_code() const;      // as shells say it; 1 of a rank that failed by leaving in a step
  std::string words() const;  // "exit code 3", "killed by signal 9 (SIGKILL)"

  friend bool operator==(const RankEnd&, const RankEnd&) = default;

  static RankEnd from(const siginfo_t& info);
};

// "SIGKILL"; for a real-time signal "signal 40".
std::string signal_name(int signal);

// [Note: first failure] Finds the rank that failed first, given the ends in the order in which they were noticed. Peers
// of a dead rank end by themselves within milliseconds, with errors of their own, and may be noticed in the same
// wake-up or even before it. So for a short while after the first failure a rank that was killed by a signal goes
// before one that exited. SIGABRT and SIGPIPE count as exits: they are how C++ programs end on a lost peer. A rank that
// says itself that another one is the reason (environment::Progress::kConsequence) gives way to any that does not. And
// where one has failed, a rank that left in the middle of a step, with exit code 0, is the reason.
class RootCause {
 public:
  struct Failure {
    base::Rank rank;
    RankEnd end;
  };

  void add(base::Rank rank, RankEnd end);

  // From now on ends are consequences: the ranks were told to end, or the peers had time to notice.
  void close() { closed_ = true; }

  const std::optional<Failure>& first() const { return first_; }
  // Ranks that had ended with exit code 0, where the first failure says that another rank is its reason; else those of
  // them whose session was not over.
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
