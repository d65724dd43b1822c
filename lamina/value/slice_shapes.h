// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

// Parameters whose values are to come, while layers are cut in another way: see [Note: released tensors] and
// [Note: guarded slices].
namespace lamina::value {

// Has a released parameter be a whole of these sizes, whatever it was a slice of.
void become_whole(const at::Tensor& released, at::IntArrayRef sizes);

// Has a released parameter be a slice of these sizes of the whole that it is.
void become_slice(const at::Tensor& released, const std::string& name, at::IntArrayRef sizes);

}  // namespace lamina::value
