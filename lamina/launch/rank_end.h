// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <string>

namespace lamina::launch {

// How a rank ended.
struct RankEnd {
  int code = 0;                // its exit code, if signal is 0
  int signal = 0;              // the signal that killed it
  bool out_of_memory = false;  // by the kernel, as it seems, for lack of memory
  bool consequence = false;    // it said that it ends because of another rank

  bool failed() const { return code != 0 || signal != 0; }
  int exit_code() const { return signal != 0 ? 128 + signal : code; }  // as shells say it
  std::string words() const;                                           // "exit code 3", "killed by signal 9 (SIGKILL)"

  friend bool operator==(const RankEnd&, const RankEnd&) = default;

  static RankEnd from(const siginfo_t& info);
};

// "SIGKILL"; for a real-time signal "signal 40".
std::string signal_name(int signal);

}  // namespace lamina::launch
