// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <vector>

#include "lamina/sharding/transfer.h"

namespace lamina::sharding {

// Memory for the sums of a member's shards, in one piece for all parameters of a type and device. Whole gradients come
// and go while sums stay: beside each other they would leave gaps, and a rank would take twice as much. The system
// gives its pages when they are first written to.
class Sums {
 public:
  Sums(std::span<const Spec> parameters, int members);

  // A tensor like this member's shard, with any values. It has the memory of the last one, or of its own as long as
  // somebody still has that one.
  at::Tensor take(std::size_t parameter);

 private:
  std::vector<at::Tensor> memory_;  // by parameter
};

}  // namespace lamina::sharding
