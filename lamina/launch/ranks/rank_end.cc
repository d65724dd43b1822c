// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/rank_end.h"

#include <string.h>

#include "lamina/base/str.h"

namespace lamina::launch {

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name ? base::str("SIG", name) : base::str("signal ", signal);
}

std::string RankEnd::words() const {
  if (left == Left::kInStep) return base::str("exit code ", code, " in the middle of step ", step);
  if (signal == 0) return base::str("exit code ", code);
  return base::str("killed by signal ", signal, " (", signal_name(signal), ")",
                   out_of_memory ? " while the kernel's OOM killer was at work: memory ran out" : "");
}

int RankEnd::exit_code() const {
  if (signal != 0) return 128 + signal;
  return left == Left::kInStep ? 1 : code;
}

RankEnd RankEnd::from(const siginfo_t& info) {
  if (info.si_code == CLD_EXITED) return {.code = info.si_status};
  return {.signal = info.si_status};
}

}  // namespace lamina::launch
