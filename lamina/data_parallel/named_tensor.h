// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace lamina::data_parallel {

// A parameter or buffer that every replica of the model has: the same name, shape and type on all of them.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

}  // namespace lamina::data_parallel
