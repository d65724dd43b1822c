// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <chrono>
#include <optional>

#include "lamina/launch/options/preparation.h"
#include "lamina/launch/ranks/doorkeeper.h"
#include "lamina/launch/ranks/guardian.h"
#include "lamina/launch/ranks/preloader.h"
#include "lamina/launch/ranks/rank_outputs.h"
#include "lamina/launch/ranks/report.h"
#include "lamina/launch/ranks/secret.h"
#include "lamina/launch/ranks/supervisor.h"
#include "lamina/launch/ranks/terminal.h"
#include "lamina/launch/ranks/watch.h"

namespace lamina::launch {

// One start of all ranks of this machine, from the first one's start until nothing is left of any of them.
struct Attempt {
  const Preparation& prepared;
  const Job& job;
  const std::optional<Secret>& secret;
  Terminal& terminal;
  RankOutputs& outputs;
  Preloader* preloader;          // none without --preload
  const Doorkeeper* doorkeeper;  // none where nobody joins the job
  ControlPipe& control;
  Signals& children;     // SIGCHLD
  const sigset_t& mask;  // of signals, for the ranks

  // Throws StartError when a rank could not be started; those that were have been ended then.
  Outcome run() const;
};

// Decides whether a job that failed is started again, at most `most` times, after a pause that doubles from start to
// start. Where it has failed in the same way twice in a row within kQuick of its start, another one would not help.
class Restarts {
 public:
  using Span = std::chrono::steady_clock::duration;
  static constexpr std::chrono::seconds kQuick{10};

  explicit Restarts(int most) : most_(most) {}

  int count() const { return count_; }
  int most() const { return most_; }

  enum class Next { kOver, kHopeless, kAgain };
  Next judge(const Outcome& outcome, Span lasted);  // kAgain counts
  std::chrono::milliseconds pause() const;          // before the start that was judged last

 private:
  const int most_;
  int count_ = 0;
  std::optional<Outcome> quick_;  // how the last start ended, if soon
};

}  // namespace lamina::launch
