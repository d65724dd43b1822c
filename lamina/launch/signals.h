// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <initializer_list>
#include <optional>

#include "lamina/base/fd.h"

namespace lamina::launch {

// Signals as a descriptor to poll instead of handlers, except those of SIGINT, SIGTERM and SIGHUP that this process was
// started to ignore (nohup, a shell's background job). SIGPIPE is held back too, so that a closed output is an error of
// write. While one lives, these signals are blocked in the calling thread; what came and was not taken is dropped at
// its end.
class Signals {
 public:
  explicit Signals(std::initializer_list<int> wanted);  // throws StartError
  ~Signals();
  Signals(const Signals&) = delete;

  int fd() const { return fd_.get(); }
  const sigset_t& mask_before() const { return before_; }

  // The next signal that came, or nothing. Never blocks.
  std::optional<int> next();

 private:
  sigset_t blocked_;
  sigset_t before_;
  base::Fd fd_;
};

}  // namespace lamina::launch
