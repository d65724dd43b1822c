// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/configured.h"

#include "lamina/plan/planner.h"

namespace lamina::plan {
namespace {

// What a message costs each rank is not in a plan's link: it has to gain a good deal.
constexpr double kMessagePrice = 0.05;

Goal goal_of(const base::Config& config) {
  Goal goal;
  goal.partitions = config.partitions;
  goal.microbatches = config.microbatches;
  goal.schedule = base::schedule_name(config.schedule);
  goal.active_microbatches = config.active_microbatches;
  goal.memory_weight = *config.memory_weight;
  goal.message_price = kMessagePrice;
  return goal;
}

}  // namespace

Report plan_for(const base::Config& config, const ModuleTree& tree) {
  const auto planner =
      config.auto_partition ? step_planner() : manual_planner(base::Partition(config.default_partition.value_or(0)));
  const Goal goal = goal_of(config);
  return report(tree, planner->assign(tree, goal), goal);
}

std::string printed(const ModuleTree& tree, const Report& report, const base::Config& config) {
  return assignments_line(tree, report.owners, config.partitions) + "\n" + describe(tree, report);
}

}  // namespace lamina::plan
