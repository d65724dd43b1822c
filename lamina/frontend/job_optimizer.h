// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lamina/distributed_optimizer/optimizer.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/lent_optimizer.h"
#include "lamina/session/change.h"

namespace lamina::frontend {

// An optimizer of the job: what its DistributedOptimizer and checkpoints share.
struct JobOptimizer {
  const std::shared_ptr<torch::optim::Optimizer> optimizer;
  const std::shared_ptr<optim::LossScale> scale;
  LentOptimizer lent;
  std::optional<distributed_optimizer::Optimizer> engine;  // always, but for another layout another one
  std::function<void()> after_step = [] {};

  JobOptimizer(std::shared_ptr<torch::optim::Optimizer> its, fused::Needs needs,
               std::shared_ptr<optim::LossScale> its_scale)
      : optimizer(std::move(its)),
        scale(std::move(its_scale)),
        lent(*optimizer, needs, [this](const at::Tensor& local) { return engine->groups().parameter_of(local); }) {}
  JobOptimizer(const JobOptimizer&) = delete;
  virtual ~JobOptimizer() = default;

  // Is the next one of the job, whose model is not cut yet or has it for the first time.
  static void join(const std::shared_ptr<JobOptimizer>& optimizer, Current& job);
  // For a change of the layout: what it is like, and if no parameter has left, and none is another tensor than the
  // model's.
  virtual session::ChangingOptimizer told() const = 0;
  bool is_whole() const { return engine->groups().are_whole(lent); }
  // Has all parameters of the model in its groups again, as before the cut. Without states these are kept elsewhere.
  void let_go(bool with_states);

  std::vector<std::vector<distributed_optimizer::OptimizerGroups::Member>> members() const {
    return engine->groups().members(lent);
  }
  // The state of this rank's members, and the options of groups.
  struct Own {
    distributed_optimizer::StateDict rows;
    std::vector<Fields> options;
  };
  Own own() const { return {engine->state_dicts().own(lent, /*joins_shards=*/false), lent.options_of_groups()}; }
  void load(const Own& own) { load_rows(own.rows, own.options); }
  // Loads a state dict; groups get these options.
  void load_rows(const distributed_optimizer::StateDict& rows, const std::vector<Fields>& options) {
    engine->load(lent, rows, [&](const std::vector<value::Value>& parts) { lent.load(parts, options); });
  }
  // Loads what this rank has of a state, which it has in parts, and gives the groups these options.
  void load_parts(const distributed_optimizer::NamedState& state, const std::vector<Fields>& options) {
    engine->load(lent, state, /*are_parts=*/true,
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
