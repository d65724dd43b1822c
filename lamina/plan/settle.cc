// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/settle.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace lamina::plan {
namespace {

// Takes what a call of `from` costs to where it runs.
void pass(Node& from, const Stretch& call, Node& to, Stretch& before, std::size_t calls) {
  const auto bytes = from.activation_bytes / static_cast<std::int64_t>(calls);
  before.forward_us += call.forward_us;
  before.backward_us += call.backward_us;
  before.value_bytes = call.value_bytes;
  to.forward_us += call.forward_us;
  to.backward_us += call.backward_us;
  to.activation_bytes += bytes;
}

}  // namespace

ModuleTree settled(ModuleTree tree) {
  std::vector<std::tuple<int, int, std::size_t>> order;  // place, node, which of its stretches
  for (int node = 0; node < static_cast<int>(tree.size()); ++node) {
    for (std::size_t i = 0; i < tree[node].stretches.size(); ++i)
      order.emplace_back(tree[node].stretches[i].at, node, i);
  }
  std::ranges::sort(order);
  Node* last = nullptr;
  Stretch* before = nullptr;
  for (const auto& [at, node, i] : order) {
    Node& module = tree[node];
    if (!module.anywhere) {
      last = &module;
      before = &module.stretches[i];
    } else if (last != nullptr) {
      if (!module.follows) module.follows = static_cast<int>(last - tree.data());
      pass(module, module.stretches[i], *last, *before, module.stretches.size());
    }
  }
  for (Node& node : tree) {
    if (!node.anywhere) continue;
    node.stretches.clear();
    node.forward_us = node.backward_us = 0;
    node.activation_bytes = node.output_bytes = 0;
  }
  return tree;
}

}  // namespace lamina::plan
