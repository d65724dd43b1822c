// SPDX-License-Identifier: Apache-2.0
// Chains of called modules, with parameters or without: few crossings, and a short step.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "lamina/base/str.h"
#include "lamina/plan/even_split.h"
#include "lamina/plan/planner.h"
#include "lamina/plan/problem.h"
#include "lamina/plan/settle.h"
#include "tests/plan/any_tree.h"
#include "tests/plan/trees.h"

namespace lamina::plan {
namespace {

// A root without work of its own over leaves, of which about so many per cent have parameters. With `nested` they are
// in containers that only call them, to any depth.
ModuleTree any_chain(int most, bool nested) {
  ModuleTree tree(1);
  const int size = *rc::gen::inRange(1, most + 1).as("modules");
  const int with_parameters = *rc::gen::inRange(0, 101).as("per cent with parameters");
  int parent = 0, at = 0;
  for (int leaf = 0; leaf < size; ++leaf) {
    for (int deeper = nested ? *rc::gen::inRange(0, 3) : 0; deeper > 0; --deeper) {
      tree.push_back({.parent = parent, .name = base::str("c", tree.size())});
      parent = static_cast<int>(tree.size()) - 1;
    }
    Node node;
    node.parent = parent;
    node.name = base::str(leaf);
    node.forward_us = *rc::gen::inRange(1, 100);
    node.backward_us = 2 * node.forward_us;
    node.output_bytes = *rc::gen::inRange(1, 100);
    node.activation_bytes = *rc::gen::inRange(0, 100);
    if (*rc::gen::inRange(0, 100) < with_parameters) give_parameters(node, {leaf});
    node.stretches = {{at++, node.forward_us, node.backward_us, node.output_bytes, true}};
    tree.push_back(node);
    for (int up = nested ? *rc::gen::inRange(0, 3) : 0; up > 0 && parent > 0; --up) parent = tree[parent].parent;
  }
  return tree;
}

int crossings(const ModuleTree& tree, const Assignment& owners) {
  const Route route = find_route(tree);
  int count = 0;
  for (std::size_t i = 1; i < route.points.size(); ++i) {
    count += owners[route.points[i - 1].node] != owners[route.points[i].node] ? 1 : 0;
  }
  return count;
}

Goal goal_of_a_job() {
  Goal goal;
  goal.partitions = *rc::gen::inRange(1, 9).as("partitions");
  goal.microbatches = *rc::gen::inRange(2, 17).as("microbatches");
  if (*rc::gen::arbitrary<bool>()) goal.schedule = "simple";
  return goal;
}

// The heaviest part of the best contiguous cut.
double best_cut(const ModuleTree& tree, const std::function<double(const Node&)>& cost, int partitions) {
  constexpr double kWhole = 1e9;
  std::vector<std::int64_t> costs;
  for (const Point& point : find_route(tree).points) costs.push_back(std::llround(kWhole * cost(tree[point.node])));
  return static_cast<double>(split_evenly(costs, partitions).largest) / kWhole;
}

// Or a V, which comes back to each but the last.
RC_GTEST_PROP(Chain, CrossesAtMostOnceBetweenTwoPartitionsAndOnceBack, ()) {
  const ModuleTree tree = any_chain(40, *rc::gen::arbitrary<bool>().as("nested"));
  Goal goal = goal_of_a_job();
  goal.memory_weight = *rc::gen::element(0.0, 0.2, 0.8, 1.0).as("memory weight");
  goal.link = any_link();
  const bool folds = goal.memory_weight < 1;
  RC_ASSERT(crossings(tree, step_planner()->assign(tree, goal)) <= (folds ? 2 : 1) * (goal.partitions - 1));
}

RC_GTEST_PROP(Chain, IsCutAlmostAsEvenlyAsTheBestCutOfItWhereMemoryAloneCounts, ()) {
  const ModuleTree tree = any_chain(40, *rc::gen::arbitrary<bool>().as("nested"));
  Goal goal = goal_of_a_job();
  goal.schedule = "interleaved";
  goal.memory_weight = 1;
  const Problem problem(tree, goal);
  const auto cost = [&](const Node& node) {
    const std::int64_t bytes = 2 * node.parameter_bytes + node.activation_bytes * goal.held();
    return problem.cost({node.forward_us, node.backward_us, bytes}, goal.memory_weight);
  };
  const Assignment owners = step_planner()->assign(tree, goal);
  std::vector<double> costs(goal.partitions);
  for (std::size_t node = 0; node < tree.size(); ++node) costs[owners[node].value] += cost(tree[node]);
  RC_ASSERT(std::ranges::max(costs) <= 1.05 * best_cut(tree, cost, goal.partitions) + 1e-6);
}

Assignment plan_of_eight(int partitions, int microbatches, double memory_weight) {
  ModuleTree tree(1);
  for (int i = 0; i < 8; ++i) {
    Node node{.parent = 0, .name = base::str(i), .forward_us = 1000, .backward_us = 2000, .activation_bytes = 1000};
    node.output_bytes = 1000;
    give_parameters(node, {i});
    tree.push_back(node);
  }
  Goal goal = over(partitions);
  goal.microbatches = microbatches;
  goal.memory_weight = memory_weight;
  goal.link = {60, 2000, 60};
  return step_planner()->assign(tree, goal);
}

Assignment owners(const std::vector<int>& ranks) { return {ranks.begin(), ranks.end()}; }

// With few microbatches the fill and drain of a cut take longer than more messages.
TEST(Chain, IsFoldedWhereThatGainsMoreThanThreePerCent) {
  EXPECT_EQ(plan_of_eight(2, 4, 0), owners({0, 0, 0, 1, 1, 1, 1, 0, 0}));
  EXPECT_EQ(plan_of_eight(4, 8, 0.2), owners({0, 0, 1, 2, 3, 3, 2, 1, 0}));
  EXPECT_EQ(plan_of_eight(2, 16, 0.2), owners({0, 0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(plan_of_eight(2, 4, 0.8), owners({0, 0, 0, 0, 0, 1, 1, 1, 1}));
}

// A module that only calls others is called where the first of these is: once, where all of them are there.
RC_GTEST_PROP(Chain, AContainerIsWhereTheFirstModuleInItIs, ()) {
  const ModuleTree tree = any_chain(30, true);
  const Goal goal = goal_of_a_job();
  const Assignment owners = step_planner()->assign(tree, goal);
  for (std::size_t node = 2; node < tree.size(); ++node) {
    if (tree[node].parent > 0 && tree[node].parent + 1 == static_cast<int>(node)) {
      RC_ASSERT(owners[node] == owners[tree[node].parent]);
    }
  }
}

// One activation after each of four layers: its cost is that of the layer before it, and nothing of it is planned.
TEST(Chain, WithOneActivationForAllLayersIsCutOnce) {
  TreeBuilder builder;
  builder.add(0, "act");
  for (int i = 0; i < 4; ++i) builder.add(0, base::str("layer", i), 100);
  ModuleTree& tree = builder.tree;
  tree[1].anywhere = true;
  tree[1].activation_bytes = 40;
  for (int i = 0; i < 4; ++i) {
    tree[2 + i].stretches = {{2 * i, 10, 20, 7, true}};
    tree[1].stretches.push_back({2 * i + 1, 1, 2, 5, true});
  }
  const ModuleTree planned = settled(tree);
  EXPECT_EQ(planned[2].activation_bytes, 10);
  EXPECT_EQ(planned[2].stretches.front().forward_us, 11);
  EXPECT_EQ(planned[2].stretches.front().value_bytes, 5);
  const Assignment owners = step_planner()->assign(planned, over(2));
  EXPECT_EQ(crossings(planned, owners), 1);
  EXPECT_EQ(owners[1], owners[0]);
}

// A call that runs anywhere is a part of the stretch in which it runs, with what it reads and what reads its result.
TEST(Chain, WithCallsThatRunAnywhereReadsWhatTheStretchesReadInWhichTheyRun) {
  TreeBuilder builder;
  for (const char* name : {"act", "first", "second", "third"}) builder.add(0, name);
  ModuleTree& tree = builder.tree;
  tree[1].anywhere = true;
  const auto stretch = [](int at, std::vector<Read> reads) {
    Stretch made;
    made.at = at;
    made.works = true;
    made.weights_us = 1;
    made.reads = std::move(reads);
    return made;
  };
  tree[2].stretches = {stretch(1, {{0, 3}})};
  tree[3].stretches = {stretch(2, {{1, 5}})};
  tree[1].stretches = {stretch(0, {}), stretch(3, {{1, 5}, {2, 7}})};
  tree[4].stretches = {stretch(4, {{2, 11}, {3, 13}})};
  const ModuleTree planned = settled(tree);
  EXPECT_EQ(planned[2].stretches[0].reads, std::vector<Read>());  // before it nothing ran
  EXPECT_EQ(planned[3].stretches[0].reads, (std::vector<Read>{{1, 10}}));
  EXPECT_EQ(planned[3].stretches[0].weights_us, 2);
  EXPECT_EQ(planned[4].stretches[0].reads, (std::vector<Read>{{2, 24}}));
}

// A flat chain without times, as where a model cannot be traced, is cut once as well.
TEST(Chain, WithoutTimesIsCutOnce) {
  TreeBuilder builder;
  for (int i = 0; i < 8; ++i) {
    builder.add(0, base::str("linear", i), 1000);
    builder.add(0, base::str("norm", i), 10);
    builder.add(0, base::str("relu", i));
    builder.add(0, base::str("dropout", i));
  }
  EXPECT_EQ(crossings(builder.tree, step_planner()->assign(builder.tree, over(2))), 1);
}

}  // namespace
}  // namespace lamina::plan
