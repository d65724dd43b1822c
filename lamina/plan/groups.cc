// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/groups.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

namespace lamina::plan {
namespace {

// The module that reads the parameters of a container that is never called, or the container that was placed by hand.
int reader_of(const ModuleTree& tree, int node) {
  while (!tree[node].callable && !tree[node].placed_at && tree[node].parent >= 0) node = tree[node].parent;
  return node;
}

}  // namespace

NodeGroups::NodeGroups(std::size_t size) : parent_(size) { std::iota(parent_.begin(), parent_.end(), 0); }

int NodeGroups::first(int node) {
  while (parent_[node] != node) node = parent_[node] = parent_[parent_[node]];
  return node;
}

void NodeGroups::join(int a, int b) {
  const auto [low, high] = std::minmax({first(a), first(b)});
  parent_[high] = low;
}

NodeGroups owned_together(const ModuleTree& tree) {
  NodeGroups groups(tree.size());
  std::unordered_map<std::int64_t, int> holder;
  for (int node = 0; node < static_cast<int>(tree.size()); ++node) {
    for (std::int64_t id : tree[node].parameter_ids) groups.join(holder.try_emplace(id, node).first->second, node);
    if (!tree[node].parameter_ids.empty()) groups.join(reader_of(tree, node), node);
    for (int other : tree[node].together) groups.join(other, node);
  }
  return groups;
}

}  // namespace lamina::plan
