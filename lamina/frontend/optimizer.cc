// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/optimizer.h"

#include <torch/optim/lbfgs.h>

#include "lamina/base/error.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/model.h"

namespace lamina::frontend {

void keep_owned(torch::optim::Optimizer& optimizer, const Owns& owns) {
  for (auto& group : optimizer.param_groups()) {
    std::erase_if(group.params(), [&](const at::Tensor& parameter) {
      if (owns(parameter)) return false;
      optimizer.state().erase(parameter.unsafeGetTensorImpl());
      return true;
    });
  }
}

void check_optimizer(const torch::optim::Optimizer& optimizer) {
  if (!outside_step("DistributedOptimizer()").pipelined()) return;
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr) return;
  throw base::UsageError(
      "LBFGS measures all parameters of a model at once, and a rank has those of its partition: with several "
      "partitions take an optimizer that updates each parameter by itself",
      base::Code{"model-one-rank-optimizer"});
}

void on_partition(const std::shared_ptr<PartitionCallback>& callback) {
  auto& job = outside_step("DistributedOptimizer()");
  job.callbacks.push_back(callback);
  if (job.model == nullptr || !job.model->partitioned()) return;
  (*callback)([&job](const at::Tensor& tensor) { return job.model->table().whole_here(tensor); });
}

}  // namespace lamina::frontend
