// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "lamina/runtime/worker_pool.h"

// Torch's state of a thread, and the part of it that goes with a call to another rank.
namespace lamina::runtime {

// The state of the thread that entered a step, and the face's context there, lent to the threads that work on it.
class Ambient {
 public:
  static std::shared_ptr<const Ambient> capture(const WorkerPool::Hooks& face = {});
  virtual ~Ambient() = default;

  // Runs `work` in this thread under the captured state. A backward in it stays wholly in this thread, so that a node
  // of its graph may wait for another rank.
  virtual void run(const std::function<void()>& work) const = 0;
};

// Grad mode, inference mode, default dtype and autocast of this thread as bytes, and back for as long as `work` runs.
std::string capture_modes();
void run_with_modes(std::string_view modes, const std::function<void()>& work);  // throws base::FormatError

// Throws base::UsageError when this thread has entered a torch function mode in the step, such as `with
// torch.device(...)`: a call of `module`, on another rank, cannot bring it along.
void check_modes_travel(const std::string& module);

}  // namespace lamina::runtime
