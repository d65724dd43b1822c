// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

namespace lamina::value {

// [Note: layers by their operations] Calls of torch's own modules in C++ cannot be seen, but for those of a Child.
// Their operations can where parameters are guarded: a Linear multiplies by its transposed weight, and adds its bias;
// an Embedding looks its weight up. So a slice may know the layer that it is of, which then computes in the place of
// these. A function gives nothing for a tensor that is not the layer's own, as what was computed of it, or for any
// tensor where the layer is gone.
struct SliceLayer {
  // The layer's result for an input, with the bias of the call, if there is one.
  std::function<std::optional<at::Tensor>(const at::Tensor& weight, const at::Tensor& input, const at::Tensor& bias)>
      linear;
  // The term to add to that where it was computed without a bias.
  std::function<std::optional<at::Tensor>(const at::Tensor& bias)> addend;
  std::function<std::optional<at::Tensor>(const at::Tensor& weight, const at::Tensor& words)> embedding;
};

// The layer of a slice; one that knows nothing at first.
SliceLayer& layer_of(const at::Tensor& slice);

}  // namespace lamina::value
