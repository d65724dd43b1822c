// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace lamina::value {

// Has the value of a tensor, and of its gradient, lie on `device` from now on, as Module::to would; the tensor keeps
// its object, its hooks and its place in optimizers. Tensors that share its memory stay where they are. Nothing for a
// tensor that is there, is on the meta device, or has no value here.
void move_in_place(const at::Tensor& tensor, at::Device device);

}  // namespace lamina::value
