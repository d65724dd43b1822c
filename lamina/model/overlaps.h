// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <vector>

namespace lamina::model {

// Finds tensors that lie in one memory, such as a parameter and another one that is a view of it: their numbers, a
// group of two or more each, in order. What has no memory here, and parts of a memory that do not meet, count as alone.
std::vector<std::vector<std::size_t>> overlaps(std::span<const at::Tensor> tensors);

}  // namespace lamina::model
