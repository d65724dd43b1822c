// SPDX-License-Identifier: Apache-2.0
#include "lamina/face/optimizer.h"

#include "lamina/face/current.h"
#include "lamina/face/model.h"

namespace lamina::face {

void trim(torch::optim::Optimizer& optimizer, const Owns& owns) {
  for (auto& group : optimizer.param_groups()) {
    std::erase_if(group.params(), [&](const at::Tensor& parameter) {
      if (owns(parameter)) return false;
      optimizer.state().erase(parameter.unsafeGetTensorImpl());
      return true;
    });
  }
}

void when_cut(const std::shared_ptr<Trim>& trim) {
  auto& job = outside_step("DistributedOptimizer()");
  job.trims.push_back(trim);
  if (job.model == nullptr || !job.model->partitioned()) return;
  (*trim)([&job](const at::Tensor& tensor) { return job.model->owns_tensor(tensor); });
}

}  // namespace lamina::face
