// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/dropout.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/ones.h>

namespace lamina::tensor_parallel {

at::Tensor dropout_of_part(const at::Tensor& part, double p, std::int64_t dim, const layout::Share& here,
                           std::int64_t all) {
  auto shape = part.sizes().vec();
  shape.at(static_cast<std::size_t>(dim < 0 ? dim + part.dim() : dim)) = all;
  const auto kept = at::dropout(at::ones(shape, part.options().requires_grad(false)), p, /*train=*/true);
  return part * kept.narrow(dim, here.begin, here.count()).clone();  // the rest is not kept for backwards
}

}  // namespace lamina::tensor_parallel
