// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/optimizer.h"

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <typeindex>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/model.h"
#include "lamina/session/optimizer_steps.h"

namespace lamina::frontend {

namespace {

// Says whether it is known to look at no more of a parameter than the element that it updates.
bool is_elementwise(const torch::optim::Optimizer& optimizer) {
  const std::type_index type = typeid(optimizer);
  return type == typeid(torch::optim::SGD) || type == typeid(torch::optim::Adam) ||
         type == typeid(torch::optim::AdamW) || type == typeid(torch::optim::Adagrad) ||
         type == typeid(torch::optim::RMSprop);
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

// The scale of the job, which is this one's.
std::shared_ptr<optim::LossScale> shared_scale(Current& job, const optim::LossScale& scale) {
  auto shared = job.loss_scale.lock();
  if (shared == nullptr) {
    shared = std::make_shared<optim::LossScale>(scale);
    job.loss_scale = shared;
    if (job.model != nullptr) job.model->scale_by(shared);
  } else if (shared->is_dynamic() || scale.is_dynamic() || shared->value() != scale.value()) {
    throw base::UsageError(
        "a job has one loss scale, which model.backward() takes: give every DistributedOptimizer the same static one, "
        "or have one optimizer, with the parameters as groups",
        base::Code{"optimizer-loss-scale"});
  }
  return shared;
}

}  // namespace

struct OptimizerPart::Rest {
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  std::shared_ptr<optim::LossScale> scale;
  session::OptimizerSteps steps;
  session::OptimizerSteps::Begun begun;
  std::int64_t measured_after = -1;  // so many backwards of the model
  int loads = 0;                     // of states into the model, when this last looked
  std::shared_ptr<PartitionCallback> on_partition;

  // Says whether the job that it was made in goes on.
  bool in_job() const {
    return has_current() && std::ranges::any_of(current().callbacks, [this](const auto& callback) {
             return callback.lock() == on_partition;
           });
  }

  Rest(std::shared_ptr<torch::optim::Optimizer> its, std::shared_ptr<optim::LossScale> its_scale,
       session::OptimizerSteps its_steps)
      : optimizer(std::move(its)), scale(std::move(its_scale)), steps(std::move(its_steps)) {}

  std::vector<at::Tensor> places() const {
    std::vector<at::Tensor> all;
    for (const auto& group : optimizer->param_groups()) {
      all.insert(all.end(), group.params().begin(), group.params().end());
    }
    return all;
  }

  // Parameters that other ranks own leave the groups; what stands for the others comes into their places.
  void keep_held(const HeldHere& held) {
    auto& model = *current().model;
    steps.set_model([&model] { return &model.table(); }, model.shared_sharding());
    for (auto& group : optimizer->param_groups()) {
      std::vector<at::Tensor> here;
      for (const auto& parameter : group.params()) {
        auto own = held(parameter);
        if (own.defined()) own = steps.place_of(own);
        if (!own.defined() || !own.is_same(parameter)) optimizer->state().erase(parameter.unsafeGetTensorImpl());
        if (own.defined()) here.push_back(std::move(own));
      }
      group.params() = std::move(here);
    }
  }

  bool is_measured() const { return current().model != nullptr && measured_after == current().model->backwards(); }

  const session::OptimizerSteps::Begun& measure(double max_norm) {
    const auto& model = current().model;
    if (model != nullptr && std::exchange(loads, model->loads()) != model->loads()) steps.stand_ins().follow();
    begun = steps.begin(places(), max_norm, model == nullptr || !model->joining());
    measured_after = model == nullptr ? 0 : model->backwards();
    return begun;
  }
};

OptimizerPart::OptimizerPart(std::shared_ptr<torch::optim::Optimizer> optimizer, const optim::LossScale& given) {
  check_optimizer(*optimizer);
  auto& job = outside_step("DistributedOptimizer()");
  auto scale = shared_scale(job, given);
  session::OptimizerSteps steps(*job.session, scale);
  rest_ = std::make_shared<Rest>(std::move(optimizer), std::move(scale), std::move(steps));
  rest_->on_partition =
      std::make_shared<PartitionCallback>([rest = rest_.get()](const auto& held) { rest->keep_held(held); });
  frontend::on_partition(rest_->on_partition);
}

bool OptimizerPart::begin_step(bool has_closure) {
  if (!rest_->in_job()) {
    if (rest_->steps.stand_ins().size() == 0 && !rest_->scale->is_on()) return true;
    throw base::UsageError("optimizer.step() of a DistributedOptimizer whose job was shut down",
                           base::Code{"step-after-shutdown"});
  }
  const auto& model = current().model;
  if (has_closure && model != nullptr && model->sharding() != nullptr) {
    throw base::UsageError(
        "optimizer.step(closure) with sharded parameters: their gradients are clipped before the step; call the "
        "closure yourself, and then optimizer.step()",
        base::Code{"shard-not-with"});
  }
  const bool sharded = model != nullptr && model->sharding() != nullptr;
  const double clip = sharded ? current().session->config().sdp_gradient_clipping : session::kNoClipping;
  if (!rest_->is_measured()) rest_->measure(clip);
  rest_->measured_after = -1;
  if (rest_->begun.overflow) {
    rest_->steps.leave_out();
    return false;
  }
  rest_->steps.give_gradients(rest_->places(), rest_->begun, /*as_is=*/false);
  return true;
}

void OptimizerPart::end_step() {
  if (rest_->in_job()) rest_->steps.end(/*as_is=*/false);
}

void OptimizerPart::zero_rest(bool set_to_none) {
  if (!rest_->in_job()) return;
  const auto& model = current().model;
  for (const auto& place : rest_->places()) {
    const auto number = rest_->steps.stand_ins().find(place);
    const auto& holder = number ? rest_->steps.stand_ins().of(*number) : place;
    auto* sharding = model == nullptr ? nullptr : model->sharding();
    if (const auto shard = sharding == nullptr ? std::nullopt : sharding->find_shard(holder)) {
      sharding->zero_grad(*shard, set_to_none);
    } else if (number && holder.grad().defined()) {
      set_to_none ? holder.mutable_grad().reset() : void(holder.mutable_grad().zero_());
    }
  }
}

double OptimizerPart::clip(double max_norm) {
  if (!rest_->in_job()) {
    throw base::UsageError("optimizer.clip_master_grads() of a DistributedOptimizer whose job was shut down",
                           base::Code{"step-after-shutdown"});
  }
  const auto& begun = rest_->measure(max_norm);
  return begun.overflow ? -1 : begun.norm;
}

bool OptimizerPart::overflow() const { return rest_->begun.overflow; }
double OptimizerPart::grad_norm() const { return rest_->begun.norm; }
double OptimizerPart::loss_scale() const { return rest_->scale->value(); }

void on_partition(const std::shared_ptr<PartitionCallback>& callback) {
  auto& job = outside_step("DistributedOptimizer()");
  job.callbacks.push_back(callback);
  if (job.model == nullptr || !job.model->partitioned()) return;
  (*callback)([&job](const at::Tensor& tensor) { return job.model->held_here(tensor); });
}

}  // namespace lamina::frontend
