// SPDX-License-Identifier: Apache-2.0
#include "lamina/device/failure.h"

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"
#include "lamina/device/streams.h"

namespace lamina::devices {
namespace {

struct Watch {
  std::mutex mutex;
  std::exception_ptr found;                      // under it
  std::mutex hearing;                            // before the other one
  std::function<void(const std::string&)> hear;  // under it, also while it is called
};

Watch& watch() {
  static auto& made = *new Watch;
  return made;
}

std::atomic<bool> failed = false;

}  // namespace

bool is_failed() { return failed; }

std::exception_ptr failure() {
  const auto stream = current_stream();
  if (!stream) return nullptr;
  std::string what;
  {
    const std::lock_guard lock(watch().mutex);
    if (watch().found) return watch().found;
    try {
      static_cast<void>(stream->query());
      return nullptr;
    } catch (const c10::AcceleratorError& error) {
      watch().found = std::current_exception();
      what = error.what_without_backtrace();
      failed = true;
    }
  }
  const std::lock_guard lock(watch().hearing);
  if (watch().hear) watch().hear(base::str("a kernel of ", stream->device(), " failed: ", what));
  return watch().found;
}

void watch_failures(std::function<void(const std::string& what)> hear) {
  const std::lock_guard lock(watch().hearing);
  watch().hear = std::move(hear);
}

std::string where_to_look() {
  const auto* const variable = rank_device().type() == at::kCUDA ? "; CUDA_LAUNCH_BLOCKING=1 shows where" : "";
  return base::str("kernels run later than they are called: an earlier one than this may have failed", variable);
}

}  // namespace lamina::devices
