// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <poll.h>
#include <signal.h>

#include <functional>
#include <initializer_list>
#include <optional>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/base/fd.h"

namespace lamina::launch {

// One round of waiting: what may happen is added, the first of it that does is acted on.
class Watch {
 public:
  void add(int fd, short events, std::function<void()> ready);
  void until(const std::optional<base::Deadline>& deadline);  // the earliest one counts

  // Waits until a descriptor is ready or the deadline has come, and calls what belongs to those that are.
  void wait();

 private:
  std::vector<pollfd> descriptors_;
  std::vector<std::function<void()>> ready_;
  std::optional<base::Deadline> deadline_;
};

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
