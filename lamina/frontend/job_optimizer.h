// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>

#include "lamina/frontend/optimizer_groups.h"
#include "lamina/optim/loss_scale.h"
#include "lamina/session/optimizer_steps.h"

namespace lamina::frontend {

// An optimizer of the job: what its DistributedOptimizer and checkpoints share.
struct JobOptimizer {
  const std::shared_ptr<torch::optim::Optimizer> optimizer;
  const std::shared_ptr<optim::LossScale> scale;
  session::OptimizerSteps steps;
  OptimizerGroups groups;
  // Updates that an error ended since a state was loaded, and loads of states: one rank alone may have made them.
  std::int64_t broken_off = 0, loads = 0;

  JobOptimizer(std::shared_ptr<torch::optim::Optimizer> its, fused::Needs needs,
               std::shared_ptr<optim::LossScale> its_scale, session::Session& session)
      : optimizer(std::move(its)),
        scale(std::move(its_scale)),
        steps(session, scale),
        groups(*optimizer, steps, needs) {}
  JobOptimizer(const JobOptimizer&) = delete;
  virtual ~JobOptimizer() = default;

  // Makes groups that came after the cut this rank's part. All ranks do.
  virtual void replace_new() = 0;
};

}  // namespace lamina::frontend
