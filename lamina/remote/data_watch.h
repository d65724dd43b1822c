// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/record_function.h>

namespace lamina::remote {

// Notices, while it lives, whether this thread lets data decide: reads a number out of a tensor, or runs an operation
// whose output's shape depends on its input's contents. What a module returned is then no promise for its next call.
class DataWatch {
 public:
  DataWatch();
  ~DataWatch();
  DataWatch(const DataWatch&) = delete;

  bool saw_data() const { return saw_; }
  // A call made in this thread was to a module that let data decide: so do all that watch around it.
  static void note();

 private:
  DataWatch* const outer_;
  at::CallbackHandle handle_;
  bool saw_ = false;
};

}  // namespace lamina::remote
