// SPDX-License-Identifier: Apache-2.0
#include "lamina/verification/parameter_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

namespace lamina::verification {

namespace autograd = torch::autograd;

// Comes after the hooks of the parameter itself, whenever those were added.
struct ParameterGradients::Hook : autograd::FunctionPreHook {
  Hook(ParameterGradients& owner, std::size_t place) : of(owner), number(place) {}
  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    if (!gradients.empty() && gradients.front().defined()) of.add(number, gradients.front());
    return gradients;
  }
  ParameterGradients& of;
  const std::size_t number;
};

ParameterGradients::ParameterGradients(std::span<const Named> parameters, std::function<bool()> counts)
    : counts_(std::move(counts)) {
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.requires_grad() || !parameter.is_leaf()) continue;
    auto hook = std::make_unique<Hook>(*this, watched_.size());
    watched_.push_back({name, parameter, {}, autograd::impl::grad_accumulator(parameter), hook.get()});
    watched_.back().node->add_pre_hook(std::move(hook));
  }
}

ParameterGradients::~ParameterGradients() {
  for (const auto& each : watched_) {
    std::erase_if(each.node->pre_hooks(), [&](const auto& hook) { return hook.get() == each.hook; });
  }
}

void ParameterGradients::add(std::size_t number, const at::Tensor& gradient) {
  if (!counts_()) return;
  const at::NoGradGuard without;
  const std::lock_guard lock(mutex_);
  at::Tensor& sum = watched_[number].sum;
  if (!sum.defined()) {
    sum = gradient.detach().clone();  // torch may make `.grad` of this one
  } else if (sum.layout() == gradient.layout()) {
    sum = sum.add(gradient.detach());
  } else {
    sum = sum.to_dense().add(gradient.detach().to_dense());
  }
}

std::vector<ParameterGradients::Named> ParameterGradients::take() {
  const std::lock_guard lock(mutex_);
  std::vector<Named> sums;
  for (auto& each : watched_) {
    const bool has_none = !each.sum.defined();
    sums.emplace_back(each.name, has_none
                                     ? at::zeros(each.parameter.sizes(), each.parameter.options().requires_grad(false))
                                     : std::exchange(each.sum, {}));
  }
  return sums;
}

}  // namespace lamina::verification
