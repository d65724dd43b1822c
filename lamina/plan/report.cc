// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/report.h"

#include "lamina/plan/bottleneck.h"
#include "lamina/plan/tied_parameters.h"

namespace lamina::plan {

Report report(const ModuleTree& tree, const Assignment& owners, const Goal& goal) {
  const Route route = find_route(tree);
  const Prediction prediction = predict(route, owners, goal);
  const std::vector<std::int64_t> parameter_bytes = group_bytes(tree);
  Report result{owners, std::vector<Stage>(goal.partitions), 0, 0, ""};
  const double step = simulated_step_us(route, owners, goal);
  const std::vector<std::int64_t> memory = memory_bytes(tree, owners, simulated_held(route, owners, goal));
  double work_us = 0;
  for (int i = 0; i < goal.partitions; ++i) {
    const RankLoad& load = prediction.ranks[i];
    work_us += load.forward_us + load.backward_us;
    result.stages[i] = {route.timed ? load.time_us() : 0, 0, memory[i], load.out_bytes};
  }
  for (std::size_t node = 0; node < tree.size(); ++node) {
    result.stages[owners[node].value].parameter_bytes += parameter_bytes[node];
  }
  for (std::size_t node = 0; node < tree.size(); ++node) {
    if (tree[node].follows) result.owners[node] = owners[*tree[node].follows];
  }
  if (step > 0) result.bubble = 1 - goal.microbatches * work_us / (goal.partitions * step);
  if (route.timed) result.predicted_step_us = step;
  result.warning = warn_of_bottleneck(tree, owners, route, prediction);
  return result;
}

}  // namespace lamina::plan
