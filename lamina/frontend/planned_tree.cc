// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Type.h>
#include <torch/nn/module.h>

#include "lamina/frontend/calls.h"
#include "lamina/frontend/tracer.h"
#include "lamina/plan/call_order.h"

namespace lamina::frontend {
namespace {

std::optional<int> by_hand(const torch::nn::Module& module, bool scopes_count) {
  const RegisteredChild* known = find_child(&module);
  if (known == nullptr) return std::nullopt;
  return known->partition || !scopes_count ? known->partition : known->scope;
}

// See [Note: anywhere] in remote/anywhere.h.
bool runs_anywhere(const ModuleTree::Node& node, const Cost* cost) {
  const torch::nn::Module& module = *node.module;
  const bool is_torchs = c10::demangle(typeid(module).name()).starts_with("torch::nn::");
  const bool holds = !module.children().empty() || !module.parameters().empty() || !module.buffers().empty();
  return is_torchs && !holds && (node.shared || (cost != nullptr && cost->calls > 1));
}

}  // namespace

std::pair<plan::ModuleTree, std::vector<int>> planned_tree(const ModuleTree& tree,
                                                           const std::optional<std::vector<Cost>>& costs,
                                                           bool scopes_count) {
  std::vector<int> parents;
  std::vector<std::optional<int>> called(tree.size());
  for (int node = 0; node < tree.size(); ++node) {
    parents.push_back(tree.nodes()[node].parent);
    if (costs) called[node] = (*costs)[node].order;
  }
  std::vector<int> order = plan::call_order(parents, called);
  std::vector<int> place(order.size());
  for (std::size_t row = 0; row < order.size(); ++row) place[order[row]] = static_cast<int>(row);
  plan::ModuleTree rows;
  for (const int node : order) {
    const auto& own = tree.nodes()[node];
    plan::Node row;
    row.parent = own.parent < 0 ? -1 : place[own.parent];
    row.name = own.name;
    row.parameter_ids = tree.parameter_ids()[node];
    for (const auto id : row.parameter_ids)
      row.parameter_bytes += static_cast<std::int64_t>(tree.parameters()[id].tensor.nbytes());
    if (const auto partition = by_hand(*own.module, scopes_count)) row.placed_at = base::Partition(*partition);
    row.anywhere = !row.placed_at && runs_anywhere(own, costs ? &(*costs)[node] : nullptr);
    if (costs) {
      const Cost& cost = (*costs)[node];
      row.forward_us = cost.forward_us;
      row.backward_us = 2 * cost.forward_us;
      row.activation_bytes = cost.activation_bytes;
      row.output_bytes = cost.output_bytes;
      row.stretches = cost.stretches;
      for (auto& stretch : row.stretches) stretch.backward_us = 2 * stretch.forward_us;
      for (const int other : cost.reads) row.together.push_back(place[other]);
    }
    rows.push_back(std::move(row));
  }
  return {std::move(rows), std::move(order)};
}

}  // namespace lamina::frontend
