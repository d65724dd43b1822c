// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/outputs.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/device/upload.h"
#include "lamina/faces/sayings.h"

namespace lamina::pipeline {

at::Tensor mean_of_outputs(at::TensorList outputs, std::span<const std::int64_t> samples) {
  auto stacked = stack_outputs(outputs);
  if (!stacked.is_floating_point() && !stacked.is_complex()) {
    stacked = stacked.to(c10::typeMetaToScalarType(c10::get_default_dtype()));
  }
  if (std::ranges::adjacent_find(samples, std::not_equal_to<>()) == samples.end()) return stacked.mean(0);
  const auto all = std::reduce(samples.begin(), samples.end(), std::int64_t{0});
  std::vector<std::int64_t> shape(stacked.dim(), 1);
  shape[0] = -1;
  const auto wide = c10::isReducedFloatingType(stacked.scalar_type()) ? stacked.to(at::kFloat) : stacked;
  const at::IntArrayRef counts(samples.data(), samples.size());
  const auto weights = at::tensor(counts, at::kDouble).div(static_cast<double>(all)).view(shape);
  const auto there = devices::upload(weights.to(c10::toRealValueType(wide.scalar_type())), wide.device());
  return wide.mul(there).sum(0).to(stacked.scalar_type());
}

at::Tensor concat_outputs(at::TensorList outputs) {
  return outputs.front().dim() == 0 ? stack_outputs(outputs) : at::cat(outputs, 0);
}

at::Tensor stack_outputs(at::TensorList outputs) {
  for (const auto& output : outputs) {
    if (output.sizes() != outputs.front().sizes()) {
      throw faces::refusal("outputs-differ", outputs.front().sizes(), output.sizes());
    }
  }
  return at::stack(outputs, 0);
}

}  // namespace lamina::pipeline
