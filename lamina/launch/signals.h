// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <optional>

#include "lamina/base/fd.h"

namespace lamina::launch {

// The signals that the launcher acts on, as a descriptor to poll instead of handlers: SIGCHLD and, unless this process
// was started with them ignored (nohup, a shell's background job), SIGINT, SIGTERM and SIGHUP. SIGPIPE is held back, so
// that a closed output is an error of write. While one lives, these signals are blocked in the calling thread;
// what came and was not taken is dropped at its end.
class Signals {
 public:
  Signals();  // throws StartError
  ~Signals();
  Signals(const Signals&) = delete;

  int fd() const { return fd_.get(); }
  const sigset_t& mask_before() const { return before_; }  // for the ranks

  // The next signal that came, or nothing. Never blocks.
  std::optional<int> next();

 private:
  sigset_t blocked_;
  sigset_t before_;
  base::Fd fd_;
};

}  // namespace lamina::launch
