// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lamina/tensor_parallel/layer_cuts.h"

// Forwards of torch's layers of which the members of a team have slices, each its own: see [Note: slicing plan].
namespace lamina::tensor_parallel {

// The forward of a Linear. `weight` and `bias`, if there is one, are this member's, as the cut says.
at::Tensor linear(const LayerCut& cut, const std::string& team, const at::Tensor& input, const at::Tensor& weight,
                  const at::Tensor& bias);

// The forward of an Embedding. Words that no member has are torch's own error.
at::Tensor embedding(const LayerCut& cut, const std::string& team, const at::Tensor& words, const at::Tensor& weight);

}  // namespace lamina::tensor_parallel
