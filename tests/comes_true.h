// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <thread>

#include "lamina/base/deadline.h"

namespace lamina {

// Waits for what another thread does, at most for a minute, which no test takes. Returns false where it does not come.
inline bool comes_true(const std::function<bool()>& condition) {
  const auto deadline = base::Deadline::after(std::chrono::minutes(1));
  while (!condition()) {
    if (deadline.expired()) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace lamina
