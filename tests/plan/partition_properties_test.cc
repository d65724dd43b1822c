// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>

#include "lamina/base/error.h"
#include "lamina/plan/candidate.h"
#include "lamina/plan/planner.h"
#include "lamina/plan/prediction.h"
#include "lamina/plan/problem.h"
#include "lamina/plan/tree_division.h"
#include "tests/plan/any_tree.h"
#include "tests/plan/trees.h"

// Promises of every planner, and what the default one promises beside.
namespace lamina::plan {
namespace {

constexpr double kRounding = 1 + 1e-9;

std::unique_ptr<Planner> any_planner() {
  return *rc::gen::arbitrary<bool>().as("the default planner") ? step_planner() : tree_planner();
}

// As the planner has it.
double step_of(const ModuleTree& tree, const Assignment& owners, const Goal& goal) {
  return mean_step_us(work_of(find_route(tree), owners, goal), goal);
}

// True where memory is evened out on the ranks before the step is made short: see Planner.
bool evens_out_costs(const ModuleTree& tree, const Goal& goal) {
  return goal.memory_weight > 0 && !Problem(tree, goal).chain.empty();
}

RC_GTEST_PROP(PlannerProperty, EveryNodeHasOnePartitionAndTheRootTheFirst, ()) {
  const ModuleTree tree = any_tree({});
  const Goal goal = any_goal();
  const Assignment owners = any_planner()->assign(tree, goal);
  RC_ASSERT(owners.size() == tree.size());
  RC_ASSERT(owners[0].value == 0);
  for (base::Partition owner : owners) RC_ASSERT(owner.value >= 0 && owner.value < goal.partitions);
}

RC_GTEST_PROP(PlannerProperty, WhatSharesParametersOrHasToBeTogetherIsInOnePartition, ()) {
  const ModuleTree tree = any_tree({});
  const Assignment owners = any_planner()->assign(tree, any_goal());
  std::map<std::int64_t, base::Partition> holder;
  for (std::size_t node = 0; node < tree.size(); ++node) {
    for (std::int64_t id : tree[node].parameter_ids) {
      RC_ASSERT(holder.try_emplace(id, owners[node]).first->second == owners[node]);
    }
    for (int other : tree[node].together) RC_ASSERT(owners[other] == owners[node]);
  }
}

RC_GTEST_PROP(PlannerProperty, WhatIsNeverCalledIsWhereItsParentIs, ()) {
  const ModuleTree tree = any_tree({});
  std::vector<bool> counts(tree.size());
  for (const Point& point : find_route(tree).points) counts[point.node] = true;
  for (std::size_t node = tree.size(); node-- > 1;) {
    if (!tree[node].parameter_ids.empty() || tree[node].activation_bytes > 0) counts[node] = true;
    if (counts[node]) counts[tree[node].parent] = true;
  }
  const Assignment owners = any_planner()->assign(tree, any_goal());
  for (std::size_t node = 1; node < tree.size(); ++node) {
    if (!counts[node] || !tree[node].callable) RC_ASSERT(owners[node] == owners[tree[node].parent]);
  }
}

RC_GTEST_PROP(PlannerProperty, PlacementsByHandHoldForAllUnderThemThatIsNotPlacedItself, ()) {
  ModuleTree tree = any_tree({.sharing = false});
  Goal goal = any_goal();
  for (Node& node : tree) {
    if (*rc::gen::inRange(0, 6) == 0) node.placed_at = base::Partition(*rc::gen::inRange(0, goal.partitions));
  }
  const Assignment owners = any_planner()->assign(tree, goal);
  std::vector<std::optional<base::Partition>> placed;
  for (std::size_t node = 0; node < tree.size(); ++node) {
    placed.push_back(tree[node].placed_at || node == 0 ? tree[node].placed_at : placed[tree[node].parent]);
    if (placed[node]) RC_ASSERT(owners[node] == *placed[node]);
  }
}

RC_GTEST_PROP(PlannerProperty, PartitionsAreNumberedInTheOrderInWhichAMicrobatchMeetsThem, ()) {
  const ModuleTree tree = any_tree({});
  const Assignment owners = any_planner()->assign(tree, any_goal());
  std::int64_t met = 0;
  for (const Point& point : find_route(tree).points) {
    RC_ASSERT(owners[point.node].value <= met + 1);
    met = std::max(met, owners[point.node].value);
  }
}

RC_GTEST_PROP(PlannerProperty, TheSameTreeGivesTheSamePlan, ()) {
  const ModuleTree tree = any_tree({});
  const Goal goal = any_goal();
  RC_ASSERT(step_planner()->assign(tree, goal) == step_planner()->assign(tree, goal));
  RC_ASSERT(tree_planner()->assign(tree, goal) == tree_planner()->assign(tree, goal));
}

RC_GTEST_PROP(PlannerProperty, OnePartitionOwnsAll, ()) {
  const ModuleTree tree = any_tree({});
  RC_ASSERT(any_planner()->assign(tree, over(1)) == Assignment(tree.size(), base::Partition(0)));
}

RC_GTEST_PROP(StepPlannerProperty, IsNeverSlowerThanTheTreePlanner, ()) {
  const ModuleTree tree = any_tree({});
  const Goal goal = any_goal();
  if (evens_out_costs(tree, goal)) return;
  const Problem problem(tree, goal);
  if (Candidate(problem, divide_tree(tree, problem)).score({}).crossings > 0)
    return;  // it tears a chain: see [Note: chain]
  const double step = step_of(tree, step_planner()->assign(tree, goal), goal);
  RC_ASSERT(step <= kRounding * step_of(tree, tree_planner()->assign(tree, goal), goal));
}

// Some per cent, for the simulated schedule jumps.
RC_GTEST_PROP(StepPlannerProperty, MorePartitionsHardlyMakeTheStepOfAChainLonger, ()) {
  ModuleTree tree = any_chain_of_leaves(12);
  for (Node& node : tree) {
    if (&node != &tree.front()) node.forward_us += 50;
  }
  Goal goal = any_goal();
  goal.active_microbatches.reset();
  goal.memory_weight = 0;
  double before = std::numeric_limits<double>::infinity();
  for (goal.partitions = 1; goal.partitions <= 8; ++goal.partitions) {
    const double step = step_of(tree, step_planner()->assign(tree, goal), goal);
    RC_ASSERT(step <= 1.1 * before);
    before = step;
  }
}

RC_GTEST_PROP(StepPlannerProperty, KeepsTheLimitOnMemoryOrSaysThatItCannot, ()) {
  const ModuleTree tree = any_tree({});
  Goal goal = any_goal();
  const Assignment together(tree.size(), base::Partition(0));
  const std::int64_t all = memory_bytes(tree, together, goal)[0];
  goal.memory_limit_bytes = all * *rc::gen::inRange(1, 100).as("per cent") / 100;
  try {
    for (std::int64_t bytes : memory_bytes(tree, step_planner()->assign(tree, goal), goal)) {
      RC_ASSERT(bytes <= *goal.memory_limit_bytes);
    }
  } catch (const base::ConfigError& error) {
    RC_ASSERT(std::string(error.what()).find("bytes per rank") != std::string::npos);
  }
}

}  // namespace
}  // namespace lamina::plan
