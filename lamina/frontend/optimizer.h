// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <typeindex>
#include <vector>

#include "lamina/frontend/fused_optimizer.h"
#include "lamina/frontend/on_partition.h"
#include "lamina/optim/loss_scale.h"

namespace lamina {

using optim::DynamicLossScale;
using optim::LossScale;

using fused::Needs;

namespace frontend {

// An optimizer's part on this rank: what stands in its groups, and what is done around its steps. See
// distributed_optimizer::Optimizer.
class OptimizerPart {
 public:
  OptimizerPart(std::shared_ptr<torch::optim::Optimizer> optimizer, const optim::LossScale& scale);

  at::Tensor step(torch::optim::Optimizer::LossClosure closure);
  // Forgets gradients, those of shards and of parameters that others stand in for, too.
  void zero_grad(bool set_to_none);
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  double clip(double max_norm);

  bool overflow() const;
  double grad_norm() const;
  double loss_scale() const;

  void save(torch::serialize::OutputArchive& archive, bool to_first) const;
  void save_local(torch::serialize::OutputArchive& archive, bool joins_shards) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  struct Rest;
  std::shared_ptr<Rest> rest_;
};

void set_needs(std::type_index optimizer, Needs needs);

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
// Its state is saved as torch's optimizers save theirs, whole on every rank, and is loaded from that, from what the
// plain optimizer has saved, or from the parts of each rank (save_local()):
//
//     torch::serialize::OutputArchive archive;
//     adamw.save(archive);                                      // on every rank
//     if (lamina::rank() == 0) archive.save_to("adamw.pt");
//     torch::load(adamw, "adamw.pt");
//
// base::UsageError comes for an optimizer that measures all parameters at once (LBFGS) with more than one partition,
// shards or divided states. With shards or divided states it also comes for a class that has not said what it needs of
// a parameter. Any use inside a step function is refused as well: one rank alone runs its body.
template <class Optimizer>
class DistributedOptimizer {
 public:
  explicit DistributedOptimizer(std::unique_ptr<Optimizer> optimizer, const LossScale& scale = LossScale())
      : optimizer_(std::move(optimizer)), part_(optimizer_, scale) {}
  explicit DistributedOptimizer(Optimizer&& optimizer, const LossScale& scale = LossScale())
      : DistributedOptimizer(std::make_unique<Optimizer>(std::move(optimizer)), scale) {}

  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) {
    checked("optimizer.step()");
    return part_.step(std::move(closure));
  }
  void zero_grad(bool set_to_none = true) {
    checked("optimizer.zero_grad()");
    part_.zero_grad(set_to_none);
  }

  // Parameters of the model, with options of their own if they have some; as torch's.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    checked("optimizer.add_param_group()");
    part_.add_param_group(group);
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

  // The state of the whole optimizer, with masters and the loss scale. Collective over all ranks of the model once it
  // is cut, and the same on all; or on mp_rank 0 alone, and nothing on the others.
  void save(torch::serialize::OutputArchive& archive, bool gather_to_rank0 = false) const {
    frontend::everywhere("optimizer.save()");
    part_.save(archive, gather_to_rank0);
  }
  // The state of what this rank updates, by the names of parameters. Of shards, and of divided states, it has this
  // rank's parts, or with `gather_if_shard` all, collectively over those who hold them.
  void save_local(torch::serialize::OutputArchive& archive, bool gather_if_shard = false) const {
    frontend::everywhere("optimizer.save_local()");
    part_.save_local(archive, gather_if_shard);
  }
  // Loads this rank's part of a state that save(), save_local() or the plain optimizer has saved: collective over all
  // ranks of the model. What save_local() saved with another partition is put together, where there are as many
  // partitions, shards and slices. Before the model is cut a state waits for that. Throws base::UsageError, alike on
  // all ranks, where it does not fit the optimizer.
  void load(torch::serialize::InputArchive& archive) {
    checked("optimizer.load()");
    part_.load(archive);
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
  frontend::OptimizerPart part_;
};

// For torch::save() and torch::load().
template <class Optimizer>
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const DistributedOptimizer<Optimizer>& optimizer) {
  optimizer.save(archive);
  return archive;
}
template <class Optimizer>
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           DistributedOptimizer<Optimizer>& optimizer) {
  optimizer.load(archive);
  return archive;
}

// Declares what a class of the program's needs of a parameter that ranks have in parts. It is kElements where it
// updates each element by itself, else kWhole: then one of these ranks has all of the parameter in a step.
template <class Optimizer>
void register_functional_optimizer(Needs needs) {
  frontend::set_needs(typeid(Optimizer), needs);
}

}  // namespace lamina
