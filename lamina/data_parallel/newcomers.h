// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

namespace lamina::data_parallel {

// Words on processes that wait to join the copies of a model ([Note: newcomers] in session/door.h), and on copies that
// want to leave. A rank at which some wait, or that wants to leave, says so in each of its passes. So all copies hear
// of it in one and the same pass, and need no message for it.
struct Newcomers {
  std::atomic<bool> wait = false;    // at this rank
  std::atomic<bool> leaves = false;  // this rank
  std::atomic<bool> heard = false;   // in a pass of all copies, of either
};

// Newcomers of this process's job.
Newcomers& newcomers();

}  // namespace lamina::data_parallel
