// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "lamina/checkpoint/part.h"

namespace lamina::checkpoint {

// Memory of the host into which parts are copied, so that training goes on while they are written. It stays from one
// save to the next.
class Snapshot {
 public:
  // Gives the parts copies of their elements.
  void take(std::span<Part> parts);

 private:
  at::Tensor memory_;
};

}  // namespace lamina::checkpoint
