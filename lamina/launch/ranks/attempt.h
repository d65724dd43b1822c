// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include "lamina/launch/options/preparation.h"
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
  Preloader* preloader;  // none without --preload
  Orders& orders;
  Signals& children;     // SIGCHLD
  const sigset_t& mask;  // of signals, for the ranks

  // Throws StartError when a rank could not be started; those that were have been ended then.
  Outcome run() const;
};

}  // namespace lamina::launch
