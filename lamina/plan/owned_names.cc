// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/owned_names.h"

#include <cctype>
#include <optional>

#include "lamina/base/str.h"

namespace lamina::plan {
namespace {

constexpr int kNobody = -1;  // nothing in the subtree counts
constexpr int kMixed = -2;

bool counts(const Node& node) { return node.callable || !node.parameter_ids.empty(); }

// Per node, the partition of its whole subtree.
std::vector<int> subtree_owners(const ModuleTree& tree, const Assignment& owners) {
  std::vector<int> whole(tree.size(), kNobody);
  const auto merge = [&](int node, int owner) {
    if (owner == kNobody) return;
    whole[node] = whole[node] == kNobody || whole[node] == owner ? owner : kMixed;
  };
  for (int node = static_cast<int>(tree.size()) - 1; node >= 0; --node) {
    if (counts(tree[node])) merge(node, static_cast<int>(owners[node].value));
    if (tree[node].parent >= 0) merge(tree[node].parent, whole[node]);
  }
  return whole;
}

// "blocks.11" is number 11 under "blocks.".
struct Numbered {
  std::string prefix;
  long number = 0;
};

std::optional<Numbered> numbered(const std::string& name) {
  std::size_t digits = name.size();
  while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
  const std::size_t length = name.size() - digits;
  if (length == 0 || length > 9 || (digits > 0 && name[digits - 1] != '.')) return std::nullopt;
  return Numbered{name.substr(0, digits), std::stol(name.substr(digits))};
}

std::vector<std::string> joined(const std::vector<std::string>& names) {
  std::vector<std::string> result;
  for (std::size_t i = 0; i < names.size();) {
    const auto first = numbered(names[i]);
    std::size_t end = i + 1;
    for (; first && end < names.size(); ++end) {
      const auto next = numbered(names[end]);
      if (!next || next->prefix != first->prefix || next->number != first->number + static_cast<long>(end - i)) break;
    }
    result.push_back(end == i + 1 ? names[i] : base::str(names[i], "-", numbered(names[end - 1])->number));
    i = end;
  }
  return result;
}

}  // namespace

std::string shown(const Node& node) {
  return node.name.empty() ? "the model itself" : base::str("\"", node.name, "\"");
}

std::vector<std::vector<std::string>> owned_names(const ModuleTree& tree, const Assignment& owners, int partitions) {
  const std::vector<int> whole = subtree_owners(tree, owners);
  std::vector<std::vector<std::string>> names(partitions);
  for (std::size_t node = 0; node < tree.size(); ++node) {
    const std::string name = tree[node].name.empty() ? "model" : tree[node].name;
    const int parent = tree[node].parent;
    if (whole[node] == kMixed && counts(tree[node])) {
      names[owners[node].value].push_back(name + " (itself)");
    } else if (whole[node] >= 0 && (parent < 0 || whole[parent] == kMixed)) {
      names[whole[node]].push_back(name);
    }
  }
  for (auto& of_partition : names) of_partition = joined(of_partition);
  return names;
}

}  // namespace lamina::plan
