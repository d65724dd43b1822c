// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lamina/distributed_optimizer/optimizer.h"
#include "lamina/frontend/fused_optimizer.h"
#include "lamina/frontend/optimizer_state.h"

namespace lamina::frontend {

// An optimizer of torch's, of a program or of ours, as the engine sees it.
class LentOptimizer : public distributed_optimizer::UserOptimizer {
 public:
  using ParameterOf = std::function<at::Tensor(const at::Tensor&)>;

  // The optimizer outlives it. `parameter_of` finds the parameter of the model for which something stands in groups.
  LentOptimizer(torch::optim::Optimizer& optimizer, fused::Needs needs, ParameterOf parameter_of);

  std::vector<Given> named_parameters() const override;
  std::vector<std::vector<Given>> groups() const override;
  std::vector<at::Tensor> members() const override;
  void trim(const std::vector<std::vector<Given>>& groups, std::span<const Moved> moved) override;
  void exchange(const std::vector<std::vector<at::Tensor>>& groups, std::span<const Moved> moved) override;
  value::Value state_of(const at::Tensor& member) const override;
  void set_state(const at::Tensor& member, value::Value state) override;
  std::string options(bool counts) const override;
  fused::Needs needs() const override { return needs_; }
  bool needs_norm() const override;
  bool takes_any_gradient() override { return fused_ != nullptr && needs_ != fused::Needs::kWhole; }
  void update(const distributed_optimizer::UpdateTerms& terms) override;
  void zero_grad(bool set_to_none) override { optimizer_.zero_grad(set_to_none); }

  // Has a step take this closure; what it has returned is for take_loss().
  distributed_optimizer::Closure closed(torch::optim::Optimizer::LossClosure closure);
  at::Tensor take_loss() { return std::exchange(loss_, {}); }

  // Gives its members these states, in their order, None for none, and its groups these options.
  void load(const std::vector<value::Value>& states, const std::vector<Fields>& options);
  // All copies have the same states again, whatever each has loaded before.
  void count_anew() { loads_ = 0; }
  // The options of its groups.
  std::vector<Fields> options_of_groups() const;
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

 private:
  // Names the members of groups, as ranks compare them.
  const std::string& names() const;

  torch::optim::Optimizer& optimizer_;
  FusedOptimizer* const fused_;  // nullptr for one of torch's, or of a program's
  const fused::Needs needs_;
  const ParameterOf parameter_of_;
  std::int64_t loads_ = 0;                              // of states, which one rank alone may have made
  mutable std::vector<std::vector<at::Tensor>> named_;  // members, when `names_` was made
  mutable std::string names_;
  at::Tensor loss_;  // that the closure of a step has given
};

// "AdamW", for one of torch's and for the engine's.
std::string class_name(const torch::optim::Optimizer& optimizer);

}  // namespace lamina::frontend
