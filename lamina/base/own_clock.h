// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include "lamina/base/fd.h"

namespace lamina::base {

// A clock that stands while the thread that made it is ready and others have its processor: what the thread does takes
// as long on it as on an idle machine, also where it sleeps. For that thread alone. Where the system does not tell
// (Linux does in /proc), it goes on meanwhile.
class OwnClock {
 public:
  OwnClock();
  std::chrono::nanoseconds now();  // it stands during a reading, too, which takes 4 us

 private:
  Fd delays_;
  std::chrono::nanoseconds reading_{};  // what one takes
  int readings_ = 0;
};

}  // namespace lamina::base
