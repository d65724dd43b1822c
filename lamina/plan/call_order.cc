// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/call_order.h"

#include <algorithm>
#include <limits>

namespace lamina::plan {

std::vector<int> call_order(const std::vector<int>& parents, const std::vector<std::optional<int>>& called) {
  const int size = static_cast<int>(parents.size());
  std::vector<int> first(size);
  for (int node = 0; node < size; ++node) first[node] = called[node].value_or(std::numeric_limits<int>::max());
  std::vector<std::vector<int>> children(size);
  for (int node = size - 1; node > 0; --node) {
    const int parent = parents[node];
    children[parent].push_back(node);
    if (!called[parent]) first[parent] = std::min(first[parent], first[node]);
  }
  std::vector<int> ordered, ahead{0};
  while (!ahead.empty() && size > 0) {
    const int node = ahead.back();
    ahead.pop_back();
    ordered.push_back(node);
    // They are in the reverse order of the tree, and the one to come first is pushed last.
    std::ranges::stable_sort(children[node], std::greater(), [&](int child) { return first[child]; });
    ahead.insert(ahead.end(), children[node].begin(), children[node].end());
  }
  return ordered;
}

}  // namespace lamina::plan
