// SPDX-License-Identifier: Apache-2.0
// The default planner beside the published one and beside all plans there are, and how long it takes.
//
//     plan_bench TREES
//
// Prints, of so many random trees, a line each: "tree" KIND PUBLISHED OPTIMUM SIMULATED. The first two are the steps of
// the published plan and of the best one (0 where there are too many to try), over the default plan's, as in the
// simulated schedule. The last is the default plan's simulated step over that of the formula. Then lines "time"
// PARTITIONS SECONDS for a tree of 1,000 modules, and "operations" PARTITIONS SECONDS for a graph of 2,000, cut so that
// few bytes go between ranks. Messages cost time in every second tree.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>

#include "lamina/plan/graph_plan.h"
#include "lamina/plan/planner.h"
#include "lamina/plan/prediction.h"
#include "lamina/plan/problem.h"

namespace {

using namespace lamina::plan;

constexpr double kMostPlans = 1'000;

// A root and leaves when `flat`, else modules anywhere; all have parameters and times.
ModuleTree random_tree(std::mt19937& random, int size, bool flat) {
  const auto up_to = [&](int most) { return static_cast<int>(random() % most); };
  ModuleTree tree(1);
  for (int at = 1; at < size; ++at) {
    Node node;
    node.parent = flat ? 0 : up_to(at);
    node.name = std::to_string(at);
    node.parameter_bytes = 1 + up_to(100'000);
    node.parameter_ids = {at};
    node.forward_us = 1 + up_to(1000);
    node.backward_us = 2 * node.forward_us;
    node.activation_bytes = up_to(100'000);
    node.output_bytes = up_to(100'000);
    tree.push_back(node);
  }
  return tree;
}

double predicted_step(const Problem& problem, const lamina::plan::Assignment& owners) {
  return step_us(predict(problem.route, owners, problem.goal).shape, problem.goal);
}

// As the default planner has it.
double step_of(const Problem& problem, const lamina::plan::Assignment& owners) {
  return mean_step_us(work_of(problem.route, owners, problem.goal), problem.goal);
}

double best_step(const Problem& problem) {
  const Goal& goal = problem.goal;
  if (std::pow(goal.partitions, problem.movable.size()) > kMostPlans) return 0;
  double best = std::numeric_limits<double>::infinity();
  std::vector<int> owners = problem.on_one_rank();
  for (std::size_t at = 0; at < problem.movable.size();) {
    best = std::min(best, step_of(problem, problem.nodes(owners)));
    for (at = 0; at < problem.movable.size() && ++owners[problem.movable[at]] == goal.partitions; ++at) {
      owners[problem.movable[at]] = 0;
    }
  }
  return std::isinf(best) ? 0 : best;
}

void compare(std::mt19937& random, int number) {
  const bool small = number % 2 == 0;
  const bool flat = number % 4 < 2;
  const ModuleTree tree = random_tree(random, small ? 3 + static_cast<int>(random() % 6) : 60, flat);
  Goal goal;
  goal.partitions = 2 + static_cast<int>(random() % (small ? 2 : 7));
  goal.microbatches = 1 + static_cast<int>(random() % 16);
  goal.memory_weight = 0;
  if (number % 8 < 4) goal.link = {20, 1000};
  const Problem problem(tree, goal);
  const auto owners = step_planner()->assign(tree, goal);
  const double step = step_of(problem, owners);
  std::printf("tree %s-%s %.6f %.6f %.6f\n", small ? "small" : "large", flat ? "chain" : "tree",
              step_of(problem, tree_planner()->assign(tree, goal)) / step, best_step(problem) / step,
              simulated_step_us(problem.route, owners, goal) / predicted_step(problem, owners));
}

void measure(std::mt19937& random, int partitions) {
  const ModuleTree tree = random_tree(random, 1000, false);
  Goal goal;
  goal.partitions = partitions;
  goal.microbatches = 64;
  goal.link = {20, 1000};
  const auto begin = std::chrono::steady_clock::now();
  step_planner()->assign(tree, goal);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf("time %d %.6f\n", partitions, took.count());
}

// Each operation reads one or two of those before it, most of them near.
ModuleTree random_graph(std::mt19937& random, int operations) {
  const auto up_to = [&](int most) { return static_cast<int>(random() % most); };
  ModuleTree tree{{.name = "model", .stretches = {{}}}};
  for (int at = 1; at <= operations; ++at) {
    Node& node = tree.emplace_back();
    node.parent = 0;
    node.name = std::to_string(at);
    node.forward_us = 1 + up_to(3);
    Stretch& stretch = node.stretches.emplace_back();
    stretch.at = at;
    stretch.forward_us = node.forward_us;
    stretch.value_bytes = 1 + up_to(100'000);
    stretch.works = true;
    stretch.reads.emplace();
    const int first = at > 1 ? std::max(1, at - 1 - up_to(8)) : 0;
    const int other =
        at > 1 && up_to(2) == 0 ? (up_to(30) == 0 ? 1 + up_to(at - 1) : std::max(1, at - 1 - up_to(8))) : 0;
    if (first > 0) stretch.reads->push_back({first, tree[first].stretches[0].value_bytes});
    if (other > 0 && other != first) stretch.reads->push_back({other, tree[other].stretches[0].value_bytes});
  }
  return tree;
}

void measure_graph(std::mt19937& random, int partitions) {
  const ModuleTree tree = random_graph(random, 2000);
  Goal goal;
  goal.partitions = partitions;
  const auto begin = std::chrono::steady_clock::now();
  graph_planner()->assign(tree, goal);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf("operations %d %.6f\n", partitions, took.count());
}

}  // namespace

int main(int count, char** words) {
  const int trees = count > 1 ? std::atoi(words[1]) : 1000;
  std::mt19937 random(1);
  for (int number = 0; number < trees; ++number) compare(random, number);
  for (const int partitions : {2, 8, 32, 128, 300}) measure(random, partitions);
  for (const int partitions : {2, 4, 8, 32}) measure_graph(random, partitions);
}
