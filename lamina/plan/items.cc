// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/items.h"

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/plan/groups.h"
#include "lamina/plan/placement.h"

namespace lamina::plan {
namespace {

// Per node, whether it or anything under it computes or holds something.
std::vector<bool> counts(const ModuleTree& tree, const Route& route) {
  std::vector<bool> does(tree.size());
  for (const Point& point : route.points) does[point.node] = true;
  for (std::size_t node = tree.size(); node-- > 0;) {
    if (!tree[node].parameter_ids.empty() || tree[node].activation_bytes > 0) does[node] = true;
    if (node > 0 && does[node]) does[tree[node].parent] = true;
  }
  return does;
}

NodeGroups grouped(const ModuleTree& tree, const Route& route) {
  NodeGroups groups = owned_together(tree);
  const std::vector<bool> does = counts(tree, route);
  for (int node = 1; node < static_cast<int>(tree.size()); ++node) {
    if (tree[node].placed_at) continue;
    if (!does[node] || !tree[node].callable) groups.join(tree[node].parent, node);
  }
  return groups;
}

// Two nodes that only others tie together are placed apart.
[[noreturn]] void refuse(const ModuleTree& tree, const Items& items, int node, base::Partition one,
                         base::Partition other) {
  const std::string& first = tree[items.first[items.of[node]]].name;
  throw base::ConfigError(
      base::str("placement of modules by hand: \"", tree[node].name, "\" is in partition ", other,
                ", but what it has to be together with, through modules that share parameters "
                "(\"",
                first, "\" is the first of them), is in partition ", one, "; place all of them in the same one"),
      base::Code{"model-shared-apart"});
}

}  // namespace

Assignment Items::spread(const std::vector<int>& owners) const {
  Assignment result;
  result.reserve(of.size());
  for (int item : of) result.emplace_back(owners[item]);
  return result;
}

Items find_items(const ModuleTree& tree, const Route& route, int partitions) {
  Items items;
  if (tree.empty()) return items;
  const auto placements = placements_by_hand(tree, std::nullopt);
  check_placements(tree, placements, partitions);
  NodeGroups groups = grouped(tree, route);
  items.of.resize(tree.size());
  for (int node = 0; node < static_cast<int>(tree.size()); ++node) {
    if (groups.first(node) == node) {
      items.of[node] = items.size();
      items.first.push_back(node);
      items.placed.emplace_back();
    } else {
      items.of[node] = items.of[groups.first(node)];
    }
    if (!placements[node]) continue;
    auto& placed = items.placed[items.of[node]];
    if (placed && placed != placements[node]) refuse(tree, items, node, *placed, *placements[node]);
    placed = placements[node];
  }
  if (!items.placed[0]) items.placed[0] = base::Partition(0);
  return items;
}

}  // namespace lamina::plan
