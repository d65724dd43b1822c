// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <iterator>
#include <memory>

#include "lamina/distributed_optimizer/optimizer.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/lent_optimizer.h"

namespace lamina::frontend {

// An optimizer of the job: what its DistributedOptimizer and checkpoints share.
struct JobOptimizer {
  const std::shared_ptr<torch::optim::Optimizer> optimizer;
  LentOptimizer lent;
  distributed_optimizer::Optimizer engine;

  JobOptimizer(std::shared_ptr<torch::optim::Optimizer> its, fused::Needs needs,
               const std::shared_ptr<optim::LossScale>& scale, Current& job)
      : optimizer(std::move(its)),
        lent(*optimizer, needs, [this](const at::Tensor& local) { return engine.groups().parameter_of(local); }),
        engine(job.session->ranks(), job.session->config(), scale, std::ssize(job.optimizers), job.clips_by_default) {}
  JobOptimizer(const JobOptimizer&) = delete;
  virtual ~JobOptimizer() = default;

  std::vector<std::vector<distributed_optimizer::OptimizerGroups::Member>> members() const {
    return engine.groups().members(lent);
  }
  // Loads what this rank has of a state, which it has in parts, and gives the groups these options.
  void load_parts(const distributed_optimizer::NamedState& state, const std::vector<Fields>& options) {
    engine.load(lent, state, /*are_parts=*/true,
                [&](const std::vector<value::Value>& parts) { lent.load(parts, options); });
  }
  // Makes groups that came after the cut this rank's part. All ranks do.
  virtual void replace_new() = 0;
};

// The optimizers of the job that are still there.
inline std::vector<std::shared_ptr<JobOptimizer>> optimizers_of(const Current& job) {
  std::vector<std::shared_ptr<JobOptimizer>> all;
  for (const auto& each : job.optimizers) {
    if (auto optimizer = each.lock()) all.push_back(std::move(optimizer));
  }
  return all;
}

}  // namespace lamina::frontend
