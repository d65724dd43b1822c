// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <cstdint>
#include <string>

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

}  // namespace lamina::launch
