// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "lamina/fused/rule.h"

namespace lamina::optim {

// Parameters of one device and type, with gradients of the same, and states that lie as they do.
struct TorchBatch {
  std::vector<at::Tensor> parameters, gradients;
  std::array<std::vector<at::Tensor>, fused::kMostStates> states;  // as declared; empty where unused
  std::vector<double> steps;                                       // that each has had before this one
  bool first = false;                                              // the states of all are new
};

// One of torch's operations that does all of a rule's update in a pass over memory; empty where torch has none for
// these hyper-parameters on this device.
std::function<void(const TorchBatch&)> torch_update(const fused::Rule& rule, fused::Hyper hyper,
                                                    const at::Tensor& like);

}  // namespace lamina::optim
