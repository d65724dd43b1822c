// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/division.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace lamina::distributed_optimizer {
namespace {

constexpr std::int64_t kPortionBytes = std::int64_t{32} << 20;

bool are_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

}  // namespace

std::pair<std::int64_t, std::int64_t> Division::own(const at::Tensor& parameter) const {
  const auto begin = std::min(parameter.numel(), group_.rank() * share(parameter));
  return {begin, std::min(parameter.numel(), begin + share(parameter))};
}

void Division::gather(std::span<const at::Tensor> parameters) {
  while (!parameters.empty()) {
    std::size_t count = 0;
    std::int64_t bytes = 0;
    while (count < parameters.size() && are_alike(parameters[count], parameters[0]) && bytes < kPortionBytes) {
      bytes += static_cast<std::int64_t>(parameters[count++].nbytes());
    }
    gather_portion(parameters.first(count));
    parameters = parameters.subspan(count);
  }
}

at::Tensor Division::scratch(std::size_t number, std::int64_t length, const at::TensorOptions& options) {
  auto& memory = scratch_.at(number);
  const auto bytes = length * static_cast<std::int64_t>(options.dtype().itemsize());
  if (!memory.defined() || memory.numel() < bytes || memory.device() != options.device()) {
    memory = at::empty({bytes}, at::TensorOptions(at::kByte).device(options.device()));
  }
  return memory.narrow(0, 0, bytes).view(c10::typeMetaToScalarType(options.dtype()));
}

void Division::gather_portion(std::span<const at::Tensor> parameters) {
  const at::NoGradGuard no_grad;
  std::int64_t length = 0;
  for (const auto& parameter : parameters) length += share(parameter);
  const auto options = parameters[0].options().requires_grad(false);
  const auto mine = scratch(0, length, options);
  std::int64_t at = 0;
  for (const auto& parameter : parameters) {
    const auto [begin, end] = own(parameter);
    mine.narrow(0, at, end - begin).copy_(parameter.detach().view({-1}).narrow(0, begin, end - begin));
    at += share(parameter);
  }
  const auto all = scratch(1, length * group_.size(), options);
  group_.all_gather(all, mine, {"gathering updated parameters", patience_})->wait();
  at = 0;
  for (const auto& parameter : parameters) {
    const auto flat = parameter.detach().view({-1});
    for (int member = 0; member < group_.size(); ++member) {
      const auto begin = std::min(parameter.numel(), member * share(parameter));
      const auto count = std::min(parameter.numel() - begin, share(parameter));
      if (member != group_.rank()) flat.narrow(0, begin, count).copy_(all.narrow(0, member * length + at, count));
    }
    at += share(parameter);
  }
}

at::Tensor Division::gather_parts(const at::Tensor& parameter, const at::Tensor& part) const {
  const at::NoGradGuard no_grad;
  const auto options = part.options().requires_grad(false);
  const auto mine = at::zeros({share(parameter)}, options);
  mine.narrow(0, 0, part.numel()).copy_(part.detach().reshape({-1}));
  const auto all = at::empty({share(parameter) * group_.size()}, options);
  group_.all_gather(all, mine, {"gathering states of an optimizer", patience_})->wait();
  return all.narrow(0, 0, parameter.numel()).reshape(parameter.sizes());
}

}  // namespace lamina::distributed_optimizer
