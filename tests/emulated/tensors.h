// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

namespace c10 {
struct IValue;
}

namespace emulated {

bool is_ours(const at::Tensor& tensor);

// A tensor of the CPU's over the same bytes, for kernels; keeps nothing alive. An undefined one stays undefined.
at::Tensor twin(const at::Tensor& tensor);

// Returns that, or for a tensor of the host's one over its bytes.
at::Tensor bytes_of(const at::Tensor& tensor);

// As it would be on the meta device: its shape alone.
at::Tensor outline(const at::Tensor& tensor);
std::optional<at::Tensor> outline(const std::optional<at::Tensor>& tensor);

// The value with its tensors changed; others stay.
c10::IValue changed(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change);

// A new tensor on the device for what an outline, or a tensor of the CPU's, describes.
at::Tensor empty_for(const at::Tensor& described, c10::Device device);

// Runs CPU operations as a kernel does: without gradients, autocast or modes.
void as_kernel(const std::function<void()>& run);

// Enqueues a kernel on the device's current stream whose results have these outlines, and returns them at once.
std::vector<at::Tensor> enqueue_kernel(c10::Device device, const std::vector<at::Tensor>& outlines,
                                       std::function<std::vector<at::Tensor>()> kernel);

}  // namespace emulated
