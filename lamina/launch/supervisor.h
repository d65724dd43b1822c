// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/launch/rank_process.h"
#include "lamina/launch/report.h"
#include "lamina/launch/signals.h"
#include "lamina/launch/verdict.h"

namespace lamina::launch {

// Watches the ranks until all have ended, and ends them when one fails or this process is told to end. It sleeps until
// a rank ends, a signal comes or a deadline of the phase passes.
//
//   running ──a rank fails──> settling ──the first failure is certain──> ending ──grace is over──> killing
//      └──────────────────── a signal (a second one: killing at once) ─────┘
class Supervisor {
 public:
  Supervisor(const std::vector<RankProcess>& ranks, Signals& signals, const Report& report);

  // Returns the launcher's exit code: 0, the first failure's, or 128 + the signal that interrupted it.
  int run();

 private:
  enum class Phase { kRunning, kSettling, kEnding, kKilling };

  void wait();
  void take_signals();
  void take_ends();
  void advance();
  void interrupt(int signal);
  void end_ranks(std::chrono::seconds grace);
  void kill_ranks();
  void enter(Phase phase, std::chrono::milliseconds limit);
  void signal_groups(int signal) const;
  int exit_code() const;

  Signals& signals_;
  const Report& report_;
  const std::vector<RankProcess>& ranks_;
  std::vector<const RankProcess*> running_;
  Verdict verdict_;
  int interruption_ = 0;  // the signal that ended the job, if one did
  Phase phase_ = Phase::kRunning;
  std::chrono::seconds grace_{0};
  std::optional<base::Deadline> deadline_;  // of the phase
};

}  // namespace lamina::launch
