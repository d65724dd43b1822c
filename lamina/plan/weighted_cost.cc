// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/weighted_cost.h"

#include <cmath>

#include "lamina/plan/even_split.h"

namespace lamina::plan {

std::vector<std::int64_t> weighted_costs(const Problem& problem, double memory_weight) {
  constexpr double kWhole = 1e9;
  std::vector<std::int64_t> costs;
  for (const Load& load : problem.loads) costs.push_back(std::llround(kWhole * problem.cost(load, memory_weight)));
  return costs;
}

std::vector<int> split_route(const Problem& problem, double memory_weight) {
  return split_route(problem, memory_weight, problem.goal.partitions);
}

std::vector<int> split_route(const Problem& problem, double memory_weight, int parts) {
  const std::vector<std::int64_t> costs = weighted_costs(problem, memory_weight);
  std::vector<std::int64_t> in_order{0};  // what is in partition 0 anyway comes first
  for (int item = 0; item < problem.items.size(); ++item) {
    if (problem.items.placed[item] && problem.items.placed[item]->value == 0) in_order.front() += costs[item];
  }
  for (int item : problem.movable) in_order.push_back(costs[item]);
  if (in_order.front() == 0) in_order.erase(in_order.begin());
  const std::size_t before = in_order.size() - problem.movable.size();
  const EvenSplit split = split_evenly(in_order, parts);
  std::vector<int> owners = problem.on_one_rank();
  std::size_t at = before;
  for (std::size_t segment = 0; segment < split.ends.size(); ++segment) {
    for (; at < split.ends[segment]; ++at) owners[problem.movable[at - before]] = static_cast<int>(segment);
  }
  return owners;
}

}  // namespace lamina::plan
