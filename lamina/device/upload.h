// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace lamina::devices {

// The tensor on a device: itself where it lies there, else a copy. This thread does not wait for it where a tensor of
// the host goes to an accelerator, and may change or drop its own at once.
at::Tensor upload(const at::Tensor& tensor, at::Device device);

}  // namespace lamina::devices
