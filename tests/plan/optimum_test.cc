// SPDX-License-Identifier: Apache-2.0
// The default planner beside exhaustive search.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "lamina/base/error.h"
#include "lamina/plan/candidate.h"
#include "lamina/plan/planner.h"
#include "lamina/plan/prediction.h"
#include "lamina/plan/problem.h"
#include "tests/plan/any_tree.h"

namespace lamina::plan {
namespace {

struct Outcome {
  double step_us = 0;
  std::int64_t fullest_bytes = 0;
};

// As the planner has it.
double step_of(const Route& route, const Assignment& owners, const Goal& goal) {
  return mean_step_us(work_of(route, owners, goal), goal);
}

std::int64_t fullest_bytes(const ModuleTree& tree, const Assignment& owners, const Goal& goal) {
  return std::ranges::max(memory_bytes(tree, owners, goal));
}

Outcome outcome_of(const ModuleTree& tree, const Route& route, const Assignment& owners, const Goal& goal) {
  return {step_of(route, owners, goal), fullest_bytes(tree, owners, goal)};
}

// Every owner of everything that a planner may move; of a chain ([Note: chain]) none, but for memory, that crosses
// more.
void for_each_plan(const ModuleTree& tree, const Goal& goal, const std::function<void(const Assignment&)>& use,
                   bool for_memory = false) {
  const Problem problem(tree, goal);
  std::vector<int> owners = problem.on_one_rank();
  while (true) {
    if (for_memory || Candidate(problem, owners).score({}).crossings == 0) use(problem.nodes(owners));
    std::size_t at = 0;
    while (at < problem.movable.size() && ++owners[problem.movable[at]] == goal.partitions)
      owners[problem.movable[at++]] = 0;
    if (at == problem.movable.size()) return;
  }
}

// Every cut of a chain of leaves into segments; the root, which only calls them, is where the first one is.
void for_each_cut(const ModuleTree& tree, const Goal& goal, const std::function<void(const Assignment&)>& use) {
  Assignment owners(tree.size());
  const std::function<void(std::size_t, int)> decide = [&](std::size_t node, int partition) {
    if (node == tree.size()) return use(owners);
    for (int next = partition; next <= std::min(partition + 1, goal.partitions - 1); ++next) {
      owners[node] = base::Partition(next);
      decide(node + 1, next);
    }
  };
  decide(std::min<std::size_t>(2, tree.size()), 0);
}

Goal small_goal() {
  Goal goal = any_goal();
  goal.partitions = *rc::gen::inRange(1, 4).as("partitions");
  return goal;
}

void expect_near_optimum(const ModuleTree& tree, Goal goal, double factor) {
  goal.memory_weight = 0;
  goal.message_price = 0.008;  // of the usual one the best step is worth less
  const Route route = find_route(tree);
  const auto step = [&](const Assignment& owners) { return step_of(route, owners, goal); };
  const double found = step(step_planner()->assign(tree, goal));
  double best = std::numeric_limits<double>::infinity();
  for_each_plan(tree, goal, [&](const Assignment& owners) { best = std::min(best, step(owners)); });
  RC_ASSERT(found <= factor * best);
}

RC_GTEST_PROP(Optimum, OfASmallTreeIsAtMostTenPerCentBetter, ()) {
  const ModuleTree tree = any_tree({.most_nodes = 9, .sharing = *rc::gen::arbitrary<bool>()});
  expect_near_optimum(tree, small_goal(), 1.1);
}

RC_GTEST_PROP(Optimum, OfTheCutsOfALongChainIsAtMostFivePerCentBetter, ()) {
  const ModuleTree tree = any_chain_of_leaves(12);
  Goal goal = any_goal();
  goal.partitions = *rc::gen::inRange(1, 5);
  goal.memory_weight = 0;
  const Route route = find_route(tree);
  const double found = step_of(route, step_planner()->assign(tree, goal), goal);
  double best = std::numeric_limits<double>::infinity();
  for_each_cut(tree, goal, [&](const Assignment& owners) { best = std::min(best, step_of(route, owners, goal)); });
  RC_ASSERT(found <= 1.05 * best);
}

// Ten per cent, where a chain's parts may not differ as the best ones do.
RC_GTEST_PROP(Optimum, OfMemoryAndTimeIsNearWhateverTheirWeights, ()) {
  const ModuleTree tree = any_chain_of_leaves(7);
  Goal goal = small_goal();
  goal.link = {};
  const Route route = find_route(tree);
  const Outcome one = outcome_of(tree, route, Assignment(tree.size()), goal);
  const auto objective = [&](const Outcome& outcome) {
    return goal.memory_weight * static_cast<double>(outcome.fullest_bytes) / static_cast<double>(one.fullest_bytes) +
           (1 - goal.memory_weight) * (one.step_us > 0 ? outcome.step_us / one.step_us : 0);
  };
  const Outcome found = outcome_of(tree, route, step_planner()->assign(tree, goal), goal);
  double best = std::numeric_limits<double>::infinity();
  for_each_cut(tree, goal, [&](const Assignment& owners) {
    const Outcome outcome = outcome_of(tree, route, owners, goal);
    if (outcome.step_us <= found.step_us) best = std::min(best, objective(outcome));
  });
  RC_ASSERT(objective(found) <= 1.1 * best);
}

RC_GTEST_PROP(Optimum, APlanThatFitsIntoMemoryIsFoundWhereThereIsOne, ()) {
  const ModuleTree tree = any_chain_of_leaves(7);
  Goal goal = small_goal();
  const std::int64_t all = memory_bytes(tree, Assignment(tree.size()), goal)[0];
  goal.memory_limit_bytes = all * *rc::gen::inRange(20, 80).as("per cent") / 100;
  std::int64_t least = all;
  for_each_plan(
      tree, goal, [&](const Assignment& owners) { least = std::min(least, fullest_bytes(tree, owners, goal)); }, true);
  if (least > *goal.memory_limit_bytes) {
    RC_ASSERT_THROWS_AS(step_planner()->assign(tree, goal), base::ConfigError);
  } else {
    RC_ASSERT(fullest_bytes(tree, step_planner()->assign(tree, goal), goal) <= *goal.memory_limit_bytes);
  }
}

}  // namespace
}  // namespace lamina::plan
