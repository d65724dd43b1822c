// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/plan_from_config.h"

#include <memory>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/plan/graph_plan.h"
#include "lamina/plan/planner.h"
#include "lamina/plan/route.h"
#include "lamina/plan/settle.h"
#include "lamina/plan/sliced_layers.h"

namespace lamina::plan {
namespace {

// Times of messages between processes of one machine: round figures within those that docs/benchmarks.md has of
// call_overhead, not calibrated. Only what is said of a plan counts them, and whether a V is worth them, so that small
// models are cut as large ones are.
constexpr Link kMessages{.latency_us = 60, .bytes_per_us = 2000, .rank_us = 60};

Goal goal_of(const config::Config& config) {
  Goal goal;
  goal.partitions = config.partitions;
  goal.microbatches = config.microbatches;
  goal.schedule = config::schedule_name(config.schedule);
  goal.active_microbatches = config.active_microbatches;
  goal.memory_weight = *config.memory_weight;
  goal.nominal = kMessages;
  return goal;
}

using Reporting = Report (*)(const ModuleTree&, const Assignment&, const Goal&);

Report planned(const config::Config& config, const ModuleTree& given, const KeptPartition& kept,
               std::unique_ptr<Planner> automatic, Reporting report) {
  const ModuleTree tree = settled(given);
  const auto planner = config.auto_partition ? std::move(automatic)
                                             : manual_planner(base::Partition(config.default_partition.value_or(0)));
  Goal goal = goal_of(config);
  auto known = owners_of(config.load_partition ? read_partition(config.partition_file.value_or("")) : kept, tree,
                         config.partitions);
  if (config.load_partition && !known) {
    throw base::ConfigError(base::str("partition_file ", config.partition_file.value_or(""),
                                      " is of another model, or of more partitions"));
  }
  const Assignment owners = known ? *std::move(known) : planner->assign(tree, goal);
  if (config.partition_file && !config.load_partition) write_partition(*config.partition_file, tree, owners);
  if (find_route(tree).timed) goal.link = goal.nominal;
  return report(tree, owners, goal);
}

}  // namespace

Report plan_for(const config::Config& config, const ModuleTree& tree, const KeptPartition& kept) {
  return planned(config, tree, kept, step_planner(), report);
}

Report plan_graph_for(const config::Config& config, const ModuleTree& tree) {
  return planned(config, tree, {}, graph_planner(), report_graph);
}

std::string printed(const ModuleTree& tree, const Report& report, const config::Config& config) {
  return assignments_line(tree, report.owners, config.partitions) + "\n" + describe(tree, report) +
         describe(SlicedLayers{config.tensor_parallel_degree, {}});
}

}  // namespace lamina::plan
