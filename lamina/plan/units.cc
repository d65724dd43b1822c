// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/units.h"

namespace lamina::plan {

WeighedTree::WeighedTree(const ModuleTree& tree)
    : tree_(tree),
      sharing_(find_sharing(tree)),
      bytes_(sharing_.bytes),
      holder_(tree.size(), -1),
      children_(tree.size()) {
  const int size = static_cast<int>(tree.size());
  for (int node = 1; node < size; ++node) children_[tree[node].parent].push_back(node);
  for (int node = size - 1; node >= 0; --node) {
    if (!tree[node].parameter_ids.empty()) holder_[node] = node;
    if (node == 0) break;
    bytes_[tree[node].parent] += bytes_[node];
    if (holder_[node] >= 0) holder_[tree[node].parent] = holder_[node];
  }
}

std::vector<Unit> WeighedTree::expand(Unit unit) const {
  std::vector<Unit> found = parts(unit);
  while (found.size() == 1) {
    unit = std::move(found.front());
    found = parts(unit);
  }
  return found;
}

std::vector<Unit> WeighedTree::parts(const Unit& unit) const {
  std::vector<Unit> found;
  for (int child : children_[unit.node]) collect(child, found);
  if (found.empty()) return found;
  found.front().heads = unit.heads;
  found.front().heads.push_back(unit.node);
  found.front().bytes = unit.bytes;
  for (std::size_t i = 1; i < found.size(); ++i) found.front().bytes -= found[i].bytes;
  return found;
}

void WeighedTree::collect(int node, std::vector<Unit>& into) const {
  if (bytes_[node] == 0) return;
  if (tree_[node].callable) {
    into.push_back({node, bytes_[node], {}});
    return;
  }
  for (int child : children_[node]) collect(child, into);
}

}  // namespace lamina::plan
