// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "lamina/frontend/on_partition.h"
#include "lamina/optim/loss_scale.h"

namespace lamina {

using optim::DynamicLossScale;
using optim::LossScale;

namespace frontend {

// An optimizer's part on this rank: what stands in its groups, and what is done around its steps. See
// session::OptimizerSteps.
class OptimizerPart {
 public:
  OptimizerPart(std::shared_ptr<torch::optim::Optimizer> optimizer, const optim::LossScale& scale);

  // Gives gradients to what is updated. False where they overflow: the step is to be left out.
  bool begin_step(bool has_closure);
  void end_step();
  // Forgets what torch's zero_grad() does not reach: gradients of shards, and of parameters that others stand in for.
  void zero_rest(bool set_to_none);
  double clip(double max_norm);

  bool overflow() const;
  double grad_norm() const;
  double loss_scale() const;

 private:
  struct Rest;
  std::shared_ptr<Rest> rest_;
};

}  // namespace frontend

// An optimizer of the whole model, made one of this rank's part of it: when the model is cut, parameters that other
// ranks own leave its groups, and shards take the places of sharded ones. Any of torch's, made of
// DistributedModel::parameters():
//
//     lamina::DistributedOptimizer adamw(torch::optim::AdamW(model.parameters(), options));
//     lamina::DistributedOptimizer adamw(std::make_unique<torch::optim::AdamW>(model.parameters(), options));
//
// With the configuration fp16 or bf16 its groups hold float32 masters of this rank's parameters; with
// shard_optimizer_state, this rank's part of each. A loss scale, of which a job has one, multiplies what
// DistributedModel::backward() is given; where gradients overflow, on any rank, all leave the step out:
//
//     lamina::DistributedOptimizer adamw(torch::optim::AdamW(...), lamina::LossScale(lamina::DynamicLossScale{}));
//
// One that measures all parameters at once (LBFGS) is refused with more than one partition, and one that is not known
// to update each element by itself with shards: base::UsageError. So is any use of it inside a step function, whose
// body one rank alone runs.
template <class Optimizer>
class DistributedOptimizer {
 public:
  explicit DistributedOptimizer(std::unique_ptr<Optimizer> optimizer, const LossScale& scale = LossScale())
      : optimizer_(std::move(optimizer)), part_(optimizer_, scale) {}
  explicit DistributedOptimizer(Optimizer&& optimizer, const LossScale& scale = LossScale())
      : DistributedOptimizer(std::make_unique<Optimizer>(std::move(optimizer)), scale) {}

  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) {
    auto& optimizer = checked("optimizer.step()");
    at::Tensor loss;
    if (closure != nullptr) {
      const at::AutoGradMode records(true);
      loss = closure();
    }
    if (!part_.begin_step(closure != nullptr)) return loss;
    optimizer.step();
    part_.end_step();
    return loss;
  }
  void zero_grad(bool set_to_none = true) {
    checked("optimizer.zero_grad()").zero_grad(set_to_none);
    part_.zero_rest(set_to_none);
  }

  // Has the next step clip gradients to that norm, of all of the model's on all ranks, without the loss scale. Returns
  // the norm as it was; -1 where they overflow, so that the step will be left out. Collective, as step() is.
  double clip_master_grads(double max_norm) {
    checked("optimizer.clip_master_grads()");
    return part_.clip(max_norm);
  }
  bool overflow() const { return part_.overflow(); }      // of the gradients in the last step
  double grad_norm() const { return part_.grad_norm(); }  // the norm that the last step measured; 0 if it did not
  double loss_scale() const { return part_.loss_scale(); }

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
  frontend::OptimizerPart part_;
};

}  // namespace lamina
