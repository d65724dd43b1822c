// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/optimizer.h"

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <typeindex>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/model.h"

namespace lamina::frontend {

void keep_held(torch::optim::Optimizer& optimizer, const HeldHere& held) {
  for (auto& group : optimizer.param_groups()) {
    std::vector<at::Tensor> here;
    for (const auto& parameter : group.params()) {
      auto own = held(parameter);
      if (!own.defined() || !own.is_same(parameter)) optimizer.state().erase(parameter.unsafeGetTensorImpl());
      if (own.defined()) here.push_back(std::move(own));
    }
    group.params() = std::move(here);
  }
}

namespace {

// Says whether it is known to look at no more of a parameter than the element that it updates.
bool is_elementwise(const torch::optim::Optimizer& optimizer) {
  const std::type_index type = typeid(optimizer);
  return type == typeid(torch::optim::SGD) || type == typeid(torch::optim::Adam) ||
         type == typeid(torch::optim::AdamW) || type == typeid(torch::optim::Adagrad) ||
         type == typeid(torch::optim::RMSprop);
}

sharding::Sharding* sharding_of_job() {
  return has_current() && current().model != nullptr ? current().model->sharding() : nullptr;
}

}  // namespace

void zero_shards(const torch::optim::Optimizer& optimizer, bool set_to_none) {
  auto* sharding = sharding_of_job();
  if (sharding == nullptr) return;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (const auto number = sharding->find_shard(parameter)) sharding->zero_grad(*number, set_to_none);
    }
  }
}

void before_step(const torch::optim::Optimizer& optimizer, bool has_closure) {
  auto* sharding = sharding_of_job();
  if (sharding == nullptr) return;
  if (has_closure) {
    throw base::UsageError(
        "optimizer.step(closure) with sharded parameters: their gradients are clipped before the step; call the "
        "closure yourself, and then optimizer.step()",
        base::Code{"shard-not-with"});
  }
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  sharding->before_step(parameters, current().session->config().sdp_gradient_clipping);
}

void after_step() {
  if (auto* sharding = sharding_of_job()) sharding->after_update();
}

void check_optimizer(const torch::optim::Optimizer& optimizer) {
  const auto& job = outside_step("DistributedOptimizer()");
  if (job.session->config().sharded_data_parallel_degree > 1 && !is_elementwise(optimizer)) {
    throw base::UsageError(
        base::str(c10::demangle(typeid(optimizer).name()),
                  " with sharded_data_parallel_degree: a rank has a shard of each parameter, and only optimizers that "
                  "update each element by itself give what they give with all of it; these do: SGD, Adam, AdamW, "
                  "Adagrad, RMSprop"),
        base::Code{"shard-optimizer"});
  }
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr || !job.pipelined()) return;
  throw base::UsageError(
      "LBFGS measures all parameters of a model at once, and a rank has those of its partition: with several "
      "partitions take an optimizer that updates each parameter by itself",
      base::Code{"model-one-rank-optimizer"});
}

void on_partition(const std::shared_ptr<PartitionCallback>& callback) {
  auto& job = outside_step("DistributedOptimizer()");
  job.callbacks.push_back(callback);
  if (job.model == nullptr || !job.model->partitioned()) return;
  (*callback)([&job](const at::Tensor& tensor) { return job.model->held_here(tensor); });
}

}  // namespace lamina::frontend
