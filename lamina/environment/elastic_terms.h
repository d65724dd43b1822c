// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>

#include "lamina/environment/environment.h"

namespace lamina::environment {

// The terms of a job whose ranks outlive others: `lamina run --elastic MIN[:MAX]`.
struct ElasticTerms {
  static constexpr std::chrono::seconds kJoinEvery{60};

  int least = 1;                                 // ranks without which nobody goes on
  int most = 0;                                  // ranks with those that join; 0: nobody does
  std::chrono::seconds join_every = kJoinEvery;  // those who are started by hand enter at most so often

  // Reads what the launcher has told; none: no such job.
  static std::optional<ElasticTerms> read(const Environment& environment);
};

// Tells whether this process is to join a job, in which it is not yet.
bool is_newcomer();

// Words of the launcher to a process that joins a job.
struct NewcomerTerms {
  static constexpr std::chrono::seconds kSpareWait{3600};

  int together = 0;                              // how many it has begun by `lamina run --join`; 0: this one comes back
  std::chrono::seconds spare_wait = kSpareWait;  // for a place, where there is none

  static NewcomerTerms read(const Environment& environment);
};

}  // namespace lamina::environment
