// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/sharing.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

namespace lamina::plan {
namespace {

// Union-find whose representative is the smallest member.
class Groups {
 public:
  explicit Groups(std::size_t size) : parent_(size) { std::iota(parent_.begin(), parent_.end(), 0); }

  int first(int node) {
    while (parent_[node] != node) node = parent_[node] = parent_[parent_[node]];
    return node;
  }

  void join(int a, int b) {
    const auto [low, high] = std::minmax({first(a), first(b)});
    parent_[high] = low;
  }

 private:
  std::vector<int> parent_;
};

int caller_of(const ModuleTree& tree, int node) {
  while (!tree[node].callable && tree[node].parent >= 0) node = tree[node].parent;
  return node;
}

Groups grouped(const ModuleTree& tree) {
  Groups groups(tree.size());
  std::unordered_map<std::int64_t, int> holder;
  for (int node = 0; node < static_cast<int>(tree.size()); ++node) {
    for (std::int64_t id : tree[node].parameter_ids) groups.join(holder.try_emplace(id, node).first->second, node);
    if (!tree[node].parameter_ids.empty()) groups.join(caller_of(tree, node), node);
    for (int other : tree[node].together) groups.join(other, node);
  }
  return groups;
}

// Per node, the bytes of its own parameters that no earlier node has.
std::vector<std::int64_t> bytes_once(const ModuleTree& tree) {
  std::unordered_map<std::int64_t, std::int64_t> known;
  for (const Node& node : tree) {
    if (node.parameter_ids.size() == 1) known[node.parameter_ids.front()] = node.parameter_bytes;
  }
  std::unordered_map<std::int64_t, int> seen_in;
  std::vector<std::int64_t> bytes;
  for (const Node& node : tree) {
    const int here = static_cast<int>(bytes.size());
    std::int64_t left = node.parameter_bytes;
    bool any_new = node.parameter_ids.empty();
    for (std::int64_t id : node.parameter_ids) {
      const bool is_new = seen_in.try_emplace(id, here).first->second == here;
      any_new |= is_new;
      if (!is_new && known.contains(id)) left -= known[id];
    }
    bytes.push_back(any_new ? std::max<std::int64_t>(left, 0) : 0);
  }
  return bytes;
}

}  // namespace

Sharing find_sharing(const ModuleTree& tree) {
  Groups groups = grouped(tree);
  const std::vector<std::int64_t> once = bytes_once(tree);
  Sharing sharing{std::vector<int>(tree.size()), std::vector<std::int64_t>(tree.size())};
  for (int node = 0; node < static_cast<int>(tree.size()); ++node) {
    sharing.first[node] = groups.first(node);
    sharing.bytes[sharing.first[node]] += once[node];
  }
  return sharing;
}

}  // namespace lamina::plan
