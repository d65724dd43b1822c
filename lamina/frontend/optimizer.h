// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "lamina/frontend/on_partition.h"

namespace lamina {

namespace frontend {
void keep_held(torch::optim::Optimizer& optimizer, const HeldHere& held);
void check_optimizer(const torch::optim::Optimizer& optimizer);
// Forgets the gradients of shards, also what their next ones would be made of.
void zero_shards(const torch::optim::Optimizer& optimizer, bool set_to_none);
// Around a step, where parameters are sharded: see sharding::Sharding::before_step().
void before_step(const torch::optim::Optimizer& optimizer, bool has_closure);
void after_step();
}  // namespace frontend

// An optimizer of the whole model, made one of this rank's part of it: when the model is cut, parameters that other
// ranks own leave its groups, and shards take the places of sharded ones. Any of torch's, made of
// DistributedModel::parameters():
//
//     lamina::DistributedOptimizer adamw(torch::optim::AdamW(model.parameters(), options));
//     lamina::DistributedOptimizer adamw(std::make_unique<torch::optim::AdamW>(model.parameters(), options));
//
// One that measures all parameters at once (LBFGS) is refused with more than one partition, and one that is not known
// to update each element by itself with shards: base::UsageError. So is any use of it inside a step function, whose
// body one rank alone runs.
template <class Optimizer>
class DistributedOptimizer {
 public:
  explicit DistributedOptimizer(std::unique_ptr<Optimizer> optimizer)
      : optimizer_(std::move(optimizer)),
        on_partition_(std::make_shared<frontend::PartitionCallback>(
            [kept = optimizer_](const auto& held) { frontend::keep_held(*kept, held); })) {
    frontend::check_optimizer(*optimizer_);
    frontend::on_partition(on_partition_);
  }
  explicit DistributedOptimizer(Optimizer&& optimizer)
      : DistributedOptimizer(std::make_unique<Optimizer>(std::move(optimizer))) {}

  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) {
    auto& optimizer = checked("optimizer.step()");
    frontend::before_step(optimizer, closure != nullptr);
    auto loss = optimizer.step(std::move(closure));
    frontend::after_step();
    return loss;
  }
  void zero_grad(bool set_to_none = true) {
    checked("optimizer.zero_grad()").zero_grad(set_to_none);
    frontend::zero_shards(*optimizer_, set_to_none);
  }
  // This rank's part of them.
  std::vector<torch::optim::OptimizerParamGroup>& param_groups() { return optimizer_->param_groups(); }

  Optimizer& operator*() { return checked("the use of an optimizer"); }
  Optimizer* operator->() { return &checked("the use of an optimizer"); }

 private:
  Optimizer& checked(const char* what) {
    frontend::everywhere(what);
    return *optimizer_;
  }

  std::shared_ptr<Optimizer> optimizer_;
  std::shared_ptr<frontend::PartitionCallback> on_partition_;
};

}  // namespace lamina
