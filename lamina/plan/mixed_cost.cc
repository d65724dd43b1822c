// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/mixed_cost.h"

#include <algorithm>
#include <cmath>

#include "lamina/plan/cut.h"
#include "lamina/plan/step_time.h"

namespace lamina::plan {
namespace {

// Each rank in turn takes as much as it can do within the limit, the last one what is left. Says how long that takes.
double fill(const Task& task, double limit_us, std::vector<int>& owners) {
  const StepTime step(task.goal, task.total.forward_us, task.total.backward_us, 0);
  int rank = 0;
  RankTime time;
  for (int item = 0; item < task.items.size(); ++item) {
    if (task.items.placed[item]) time.forward_us += task.weights[item].time_us();
  }
  double longest_us = step.of(time);
  for (const int item : task.movable) {
    time.forward_us += task.weights[item].time_us();
    if (step.of(time) > limit_us && rank + 1 < task.goal.partitions) {
      time.before_us += time.forward_us - task.weights[item].time_us();
      time.forward_us = task.weights[item].time_us();
      ++rank;
    }
    longest_us = std::max(longest_us, step.of(time));
    owners[item] = rank;
  }
  return longest_us;
}

}  // namespace

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

std::vector<int> cut_for_step(const Task& task) {
  constexpr int kHalvings = 40;
  std::vector<int> owners = task.on_one_rank();
  double too_short_us = 0;
  double enough_us = task.goal.microbatches * task.total.time_us();
  for (int i = 0; i < kHalvings; ++i) {
    const double limit_us = (too_short_us + enough_us) / 2;
    (fill(task, limit_us, owners) <= limit_us ? enough_us : too_short_us) = limit_us;
  }
  fill(task, enough_us, owners);
  return owners;
}

}  // namespace lamina::plan
