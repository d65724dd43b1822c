// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

namespace lamina::runtime {

// The process's default dtype while it lives, in a context or outside any.
class DefaultDtype {
 public:
  explicit DefaultDtype(at::ScalarType dtype);
  ~DefaultDtype();
  DefaultDtype(const DefaultDtype&) = delete;

 private:
  const at::ScalarType before_;
};

}  // namespace lamina::runtime
