// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/mixed_cost.h"

#include <cmath>

#include "lamina/plan/cut.h"

namespace lamina::plan {

std::vector<std::int64_t> mixed_costs(const Task& task, double memory_weight) {
  constexpr double kWhole = 1e9;
  std::vector<std::int64_t> costs;
  for (const Weight& weight : task.weights) costs.push_back(std::llround(kWhole * task.cost(weight, memory_weight)));
  return costs;
}

std::vector<int> cut_route(const Task& task, double memory_weight) {
  const std::vector<std::int64_t> costs = mixed_costs(task, memory_weight);
  std::vector<std::int64_t> in_order{0};  // what is in partition 0 anyway comes first
  for (int item = 0; item < task.items.size(); ++item) {
    if (task.items.placed[item] && task.items.placed[item]->value == 0) in_order.front() += costs[item];
  }
  for (int item : task.movable) in_order.push_back(costs[item]);
  if (in_order.front() == 0) in_order.erase(in_order.begin());
  const std::size_t before = in_order.size() - task.movable.size();
  const Cut cut = cut_evenly(in_order, task.goal.partitions);
  std::vector<int> owners = task.on_one_rank();
  std::size_t at = before;
  for (std::size_t segment = 0; segment < cut.ends.size(); ++segment) {
    for (; at < cut.ends[segment]; ++at) owners[task.movable[at - before]] = static_cast<int>(segment);
  }
  return owners;
}

}  // namespace lamina::plan
