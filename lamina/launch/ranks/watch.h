// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <poll.h>

#include <functional>
#include <optional>
#include <vector>

#include "lamina/base/deadline.h"

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

}  // namespace lamina::launch
