// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <initializer_list>
#include <optional>

#include "lamina/base/fd.h"

namespace lamina::launch {

// Signals as a descriptor to poll instead of handlers, except those of SIGINT, SIGTERM and SIGHUP that this process was
// started to ignore (nohup, a shell's background job). SIGPIPE and SIGXFSZ are held back too, so that an output that is
// closed, or full, is an error of write. These signals stay blocked in the calling thread when this has ended: one that
// comes while a process leaves with its exit code must not end it with another.
class Signals {
 public:
  explicit Signals(std::initializer_list<int> wanted);  // throws StartError
  Signals(const Signals&) = delete;

  int fd() const { return fd_.get(); }
  const sigset_t& mask_before() const { return before_; }

  // The next signal that came, or nothing. Never blocks.
  std::optional<int> next();

 private:
  sigset_t before_;
  base::Fd fd_;
};

}  // namespace lamina::launch
