// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/library.h>

#include <mutex>
#include <set>

namespace lamina::devices {

// Kernels that stand in the place of torch's, for as long as the process lives. Which devices there are is known late:
// so they are added for a key of the dispatcher when the first tensor with it is at hand.
class OwnKernels {
 public:
  using Add = void (*)(torch::Library& aten);
  explicit OwnKernels(Add add) : add_(add) {}

  // From any thread; the first call for a key adds them.
  void add_for(c10::DispatchKey key) {
    const std::lock_guard lock(mutex_);
    if (!keys_.insert(key).second) return;
    add_(*new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));  // for good
  }

 private:
  const Add add_;
  std::mutex mutex_;
  std::set<c10::DispatchKey> keys_;  // for which they are there
};

}  // namespace lamina::devices
