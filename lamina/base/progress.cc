// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/progress.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

namespace lamina::base {

ProgressReporter::ProgressReporter() {
  const char* variable = std::getenv("LAMINA_PROGRESS_FD");
  if (variable != nullptr) socket_ = std::atoi(variable);
}

void ProgressReporter::send(std::int64_t step, bool inside) const {
  if (socket_ < 0) return;
  const Progress progress{.step = step, .process = ::getpid(), .inside = inside ? 1 : 0};
  ::send(socket_, &progress, sizeof progress, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace lamina::base
