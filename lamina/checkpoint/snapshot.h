// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>

#include "lamina/checkpoint/part.h"
#include "lamina/device/streams.h"

namespace lamina::checkpoint {

// Memory of the host into which parts are copied, so that training goes on while they are written. It stays from one
// save to the next. A device copies its parts where its stream has come to them, and computes on after that; this
// thread does not wait.
class Snapshot {
 public:
  // Gives the parts copies of their elements, which are there when the mark has passed.
  std::shared_ptr<const devices::Mark> take(std::span<Part> parts);

 private:
  at::Tensor memory_;
  std::shared_ptr<const devices::Mark> copied_;
};

}  // namespace lamina::checkpoint
