// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/tied_parameters.h"

#include <algorithm>
#include <unordered_map>

#include "lamina/plan/groups.h"

namespace lamina::plan {
namespace {

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

std::vector<std::int64_t> group_bytes(const ModuleTree& tree) {
  NodeGroups groups = owned_together(tree);
  const std::vector<std::int64_t> once = bytes_once(tree);
  std::vector<std::int64_t> bytes(tree.size());
  for (int node = 0; node < static_cast<int>(tree.size()); ++node) bytes[groups.first(node)] += once[node];
  return bytes;
}

}  // namespace lamina::plan
