// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "lamina/runtime/worker_pool.h"

namespace lamina::runtime {

// The state of the thread that entered a step, and the face's context there, lent to the threads that work on it.
class ThreadState {
 public:
  static std::shared_ptr<const ThreadState> capture(const WorkerPool::Hooks& face = {});
  virtual ~ThreadState() = default;

  // Runs `work` in this thread under the captured state. A backward in it stays wholly in this thread, so that a node
  // of its graph may wait for another rank.
  virtual void run(const std::function<void()>& work) const = 0;
};

// Throws base::UsageError when this thread has entered a torch function mode in the step, such as `with
// torch.device(...)`: a call of `module`, on another rank, cannot bring it along.
void check_modes_travel(const std::string& module);

}  // namespace lamina::runtime
