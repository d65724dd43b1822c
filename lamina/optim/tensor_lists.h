// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "lamina/fused/value.h"

namespace lamina::optim {

// Tensors of one device and type as arrays that rules compute with; see [Note: values]. An operation is one of torch's
// on the whole list.
class TensorList final : public fused::Arrays {
 public:
  explicit TensorList(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}

  fused::Value unary(Unary operation, bool in_place) override;
  fused::Value binary(Binary operation, const fused::Value& other, bool in_place) override;
  fused::Value by_sign(const fused::Value& negative, const fused::Value& zero, const fused::Value& positive) override;

  const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  std::vector<at::Tensor> tensors_;
};

fused::Value value_of(std::vector<at::Tensor> tensors);
// The tensors that a value was made of.
const std::vector<at::Tensor>& tensors_of(const fused::Value& value);

}  // namespace lamina::optim
