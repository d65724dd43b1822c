// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "lamina/plan/partition.h"
#include "tests/plan/trees.h"

namespace lamina::plan {
namespace {

// Parameter `id` has id + 1 bytes, so that the parameters of different nodes agree on their sizes.
void give_parameters(Node& node, const std::vector<std::int64_t>& ids) {
  node.parameter_ids = ids;
  for (std::int64_t id : ids) node.parameter_bytes += id + 1;
}

// Any tree, depth first. With sharing, parameters are drawn from few ids.
ModuleTree any_tree(bool sharing) {
  ModuleTree tree(1);
  const int size = *rc::gen::inRange(1, 40).as("nodes");
  for (int at = 1; at < size; ++at) {
    int parent = at - 1;
    for (int up = *rc::gen::inRange(0, 4); up > 0 && parent > 0; --up) parent = tree[parent].parent;
    Node node;
    node.parent = parent;
    node.name = "m." + std::to_string(at);
    node.callable = *rc::gen::inRange(0, 5) > 0;
    const int count = *rc::gen::inRange(0, 3);
    std::vector<std::int64_t> ids;
    for (int i = 0; i < count; ++i) ids.push_back(sharing ? *rc::gen::inRange(0, 20) * 2 + i : at * 2 + i);
    give_parameters(node, ids);
    tree.push_back(node);
  }
  return tree;
}

std::vector<bool> has_parameters(const ModuleTree& tree) {
  std::vector<bool> has(tree.size());
  for (std::size_t node = tree.size(); node-- > 0;) {
    if (!tree[node].parameter_ids.empty()) has[node] = true;
    if (node > 0 && has[node]) has[tree[node].parent] = true;
  }
  return has;
}

int any_partitions() { return *rc::gen::inRange(1, 9).as("partitions"); }

RC_GTEST_PROP(PlannerProperty, EveryNodeHasOnePartitionAndTheRootTheFirst, ()) {
  const ModuleTree tree = any_tree(true);
  const int partitions = any_partitions();
  const Assignment owners = contiguous_planner()->assign(tree, over(partitions));
  RC_ASSERT(owners.size() == tree.size());
  RC_ASSERT(owners[0].value == 0);
  for (base::Partition owner : owners) RC_ASSERT(owner.value >= 0 && owner.value < partitions);
}

RC_GTEST_PROP(PlannerProperty, SharedParametersAreInOnePartition, ()) {
  const ModuleTree tree = any_tree(true);
  const Assignment owners = contiguous_planner()->assign(tree, over(any_partitions()));
  std::map<std::int64_t, base::Partition> holder;
  for (std::size_t node = 0; node < tree.size(); ++node) {
    for (std::int64_t id : tree[node].parameter_ids) {
      RC_ASSERT(holder.try_emplace(id, owners[node]).first->second == owners[node]);
    }
  }
}

RC_GTEST_PROP(PlannerProperty, WithoutParametersOrCallsAModuleIsWhereItsParentIs, ()) {
  const ModuleTree tree = any_tree(true);
  const Assignment owners = contiguous_planner()->assign(tree, over(any_partitions()));
  const std::vector<bool> has = has_parameters(tree);
  for (std::size_t node = 1; node < tree.size(); ++node) {
    if (!has[node] || !tree[node].callable) RC_ASSERT(owners[node] == owners[tree[node].parent]);
  }
}

RC_GTEST_PROP(PlannerProperty, PartitionsAreContiguousInModuleOrder, ()) {
  const ModuleTree tree = any_tree(false);
  const Assignment owners = contiguous_planner()->assign(tree, over(any_partitions()));
  const std::vector<bool> has = has_parameters(tree);
  base::Partition last(0);
  for (std::size_t node = 0; node < tree.size(); ++node) {
    if (!has[node] || !tree[node].callable) continue;
    RC_ASSERT(owners[node] >= last);
    RC_ASSERT(owners[node].value <= last.value + 1);
    last = owners[node];
  }
}

RC_GTEST_PROP(PlannerProperty, TheSameTreeGivesTheSamePlan, ()) {
  const ModuleTree tree = any_tree(true);
  const int partitions = any_partitions();
  RC_ASSERT(contiguous_planner()->assign(tree, over(partitions)) ==
            contiguous_planner()->assign(tree, over(partitions)));
}

RC_GTEST_PROP(PlannerProperty, AChainOfLeavesIsNoFurtherFromTheMeanThanItsHeaviest, ()) {
  TreeBuilder builder;
  const auto weights = *rc::gen::nonEmpty(rc::gen::container<std::vector<int>>(rc::gen::inRange(1, 1000)));
  for (std::size_t i = 0; i < weights.size(); ++i) builder.add(0, std::to_string(i), weights[i]);
  const int partitions = any_partitions();
  const Assignment owners = contiguous_planner()->assign(builder.tree, over(partitions));
  std::vector<std::int64_t> bytes(partitions);
  for (std::size_t i = 0; i < weights.size(); ++i) bytes[owners[i + 1].value] += weights[i];
  const std::int64_t total = std::accumulate(weights.begin(), weights.end(), std::int64_t(0));
  const int heaviest = *std::max_element(weights.begin(), weights.end());
  RC_ASSERT(*std::max_element(bytes.begin(), bytes.end()) <= total / partitions + heaviest);
  const auto used = std::count_if(bytes.begin(), bytes.end(), [](std::int64_t b) { return b > 0; });
  RC_ASSERT(used == std::min<std::ptrdiff_t>(partitions, static_cast<std::ptrdiff_t>(weights.size())));
}

RC_GTEST_PROP(PlannerProperty, OnePartitionOwnsAll, ()) {
  const ModuleTree tree = any_tree(true);
  RC_ASSERT(contiguous_planner()->assign(tree, over(1)) == Assignment(tree.size(), base::Partition(0)));
}

}  // namespace
}  // namespace lamina::plan
