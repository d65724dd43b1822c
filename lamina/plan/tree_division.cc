// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/tree_division.h"

#include <queue>
#include <span>
#include <utility>

#include "lamina/plan/even_split.h"
#include "lamina/plan/weighted_cost.h"

namespace lamina::plan {
namespace {

class TreeDivision {
 public:
  TreeDivision(const ModuleTree& tree, const Problem& problem) : costs_(tree.size()), children_(tree.size()) {
    const std::vector<std::int64_t> of_items = weighted_costs(problem, problem.goal.memory_weight);
    for (int item = 0; item < problem.items.size(); ++item) costs_[problem.items.first[item]] = of_items[item];
    for (std::size_t node = tree.size(); node-- > 1;) costs_[tree[node].parent] += costs_[node];
    for (std::size_t node = 1; node < tree.size(); ++node)
      children_[tree[node].parent].push_back(static_cast<int>(node));
    partitions_.resize(tree.size());
    for (int i = 0; i < problem.goal.partitions; ++i) partitions_[0].push_back(i);
  }

  std::vector<int> run(const Problem& problem) {
    // Parents come before their children, as they do breadth first.
    for (std::size_t node = 0; node < partitions_.size(); ++node) divide(children_[node], partitions_[node]);
    std::vector<int> owners = problem.on_one_rank();
    for (int item = 0; item < problem.items.size(); ++item) {
      const bool fixed = problem.items.placed[item] && item != problem.leader;
      if (!fixed) owners[item] = partitions_[problem.items.first[item]].front();
    }
    if (!problem.leader) return owners;
    const int led = owners[*problem.leader];
    for (int item = 0; item < problem.items.size(); ++item) {
      const bool moves = !problem.items.placed[item] || item == problem.leader;
      if (moves && (owners[item] == led || owners[item] == 0)) owners[item] = led - owners[item];
    }
    return owners;
  }

 private:
  // Nodes in a row, and the partitions they have together.
  void divide(std::span<const int> nodes, const std::vector<int>& partitions) {
    if (nodes.empty()) return;
    if (nodes.size() == 1 || partitions.size() == 1) {
      for (int node : nodes) partitions_[node] = partitions;
      return;
    }
    std::vector<std::int64_t> costs;
    for (int node : nodes) costs.push_back(costs_[node]);
    const EvenSplit split = split_evenly(costs, static_cast<int>(partitions.size()));
    std::vector<std::int64_t> of_segments;
    std::size_t begin = 0;
    for (std::size_t end : split.ends) {
      of_segments.push_back(0);
      for (; begin < end; ++begin) of_segments.back() += costs[begin];
    }
    const auto shares = share_out(partitions, of_segments);
    begin = 0;
    for (std::size_t i = 0; i < shares.size(); ++i) {
      const auto segment = nodes.subspan(begin, split.ends[i] - begin);
      divide(segment, shares[i].empty() ? std::vector<int>{partitions.front()} : shares[i]);
      begin = split.ends[i];
    }
  }

  std::vector<std::int64_t> costs_;           // per node, with all under it
  std::vector<std::vector<int>> children_;    // per node
  std::vector<std::vector<int>> partitions_;  // per node: those that it and what is under it share
};

}  // namespace

std::vector<std::vector<int>> share_out(const std::vector<int>& partitions, const std::vector<std::int64_t>& costs) {
  std::vector<std::vector<int>> shares(costs.size());
  // Among equal quotients the first segment's is on top.
  std::priority_queue<std::pair<double, int>> quotients;
  const auto push = [&](int i) {
    quotients.emplace(static_cast<double>(costs[i]) / static_cast<double>(shares[i].size() + 1), -i);
  };
  for (int i = 0; i < static_cast<int>(costs.size()); ++i) push(i);
  for (int partition : partitions) {
    const int best = -quotients.top().second;
    quotients.pop();
    shares[best].push_back(partition);
    push(best);
  }
  return shares;
}

std::vector<int> divide_tree(const ModuleTree& tree, const Problem& problem) {
  return TreeDivision(tree, problem).run(problem);
}

}  // namespace lamina::plan
