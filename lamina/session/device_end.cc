// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/device_end.h"

#include <condition_variable>
#include <mutex>

#include "lamina/device/streams.h"

namespace lamina::session {

void await_device(const Session& session) {
  const devices::Mark end;
  if (end.passed()) return;
  std::mutex mutex;
  std::condition_variable nobody_tells;  // of an event: it is looked at
  std::unique_lock lock(mutex);
  base::wait_until(
      lock, nobody_tells, session.patience(), [&] { return end.passed(); },
      [] { return std::string("what the rank's device has still to compute"); });
}

}  // namespace lamina::session
