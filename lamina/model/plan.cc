// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/plan.h"

#include <algorithm>

#include "lamina/model/overlaps.h"
#include "lamina/model/persistence.h"
#include "lamina/plan/call_order.h"
#include "lamina/plan/plan_from_config.h"

namespace lamina::model {
namespace {

// A call of it on any rank is the same, and several want one: wherever it lived, it would draw the values of all its
// callers to one rank. See [Note: anywhere] in remote/anywhere.h.
bool runs_anywhere(const ModuleTree::Node& node, const Cost* cost) {
  return node.holds_nothing && !node.placed_at && std::max(node.places, cost == nullptr ? 0 : cost->calls) > 1;
}

// The stretches, with a node's times shared out among them as theirs were.
std::vector<plan::Stretch> scaled(const Cost& cost) {
  double forward_us = 0, backward_us = 0;
  for (const auto& stretch : cost.stretches) {
    forward_us += stretch.forward_us;
    backward_us += stretch.backward_us;
  }
  const auto count = static_cast<double>(cost.stretches.size());
  const auto share = [count](double whole, double part, double total) {
    return total > 0 ? whole * part / total : whole / count;
  };
  auto stretches = cost.stretches;
  for (auto& stretch : stretches) {
    stretch.forward_us = share(cost.forward_us, stretch.forward_us, forward_us);
    const double counted_us = stretch.backward_us;
    stretch.backward_us = share(cost.backward_us, stretch.backward_us, backward_us);
    if (!stretch.weights_us) continue;
    const double part = counted_us > 0 ? *stretch.weights_us / counted_us : 0;
    stretch.weights_us = std::min(part * stretch.backward_us, stretch.backward_us);
  }
  return stretches;
}

void add_cost(plan::Node& row, const Cost& cost, const std::vector<int>& place) {
  row.forward_us = cost.forward_us;
  row.backward_us = cost.backward_us;
  row.activation_bytes = cost.activation_bytes;
  row.output_bytes = cost.output_bytes;
  row.stretches = scaled(cost);
  std::set<int> together;
  for (const auto* nodes : {&cost.reads, &cost.ties}) {
    for (const int node : *nodes) together.insert(place[node]);
  }
  row.together.assign(together.begin(), together.end());
}

// Nodes that hold tensors in one memory belong together: a write to one of these is a write to all.
void join_sharers(const ModuleTree& tree, const std::vector<int>& place, plan::ModuleTree& rows) {
  const auto held = tree.tensors();
  std::vector<at::Tensor> tensors;
  for (const auto& each : held) tensors.push_back(each.tensor);
  for (const auto& group : overlaps(tensors)) {
    for (const auto number : group) {
      rows[place[held[number].node]].together.push_back(place[held[group.front()].node]);
    }
  }
}

// Counts what a rank has of a parameter.
std::int64_t bytes_on_a_rank(const ModuleTensor& held, const config::Config& config) {
  const int degree = config.sharded_data_parallel_degree;
  const auto& parameter = held.tensor;
  const bool whole = degree == 1 || !may_be_sharded(held.name, parameter, config);
  const auto elements = whole ? parameter.numel() : layout::share_of(parameter.numel(), degree, 0).size;
  return elements * static_cast<std::int64_t>(parameter.element_size());
}

}  // namespace

std::pair<plan::ModuleTree, std::vector<int>> plan_rows(const ModuleTree& tree, const Costs& costs) {
  std::vector<int> parents;
  std::vector<std::optional<int>> called(tree.size());
  for (int node = 0; node < tree.size(); ++node) {
    parents.push_back(tree.nodes()[node].parent);
    if (costs) called[node] = costs->at(node).order;
  }
  std::vector<int> order = plan::call_order(parents, called);
  std::vector<int> place(order.size());
  for (std::size_t row = 0; row < order.size(); ++row) place[order[row]] = static_cast<int>(row);
  plan::ModuleTree rows;
  for (const int node : order) {
    const auto& own = tree.nodes()[node];
    const Cost* const cost = costs ? &costs->at(node) : nullptr;
    plan::Node row;
    row.parent = own.parent < 0 ? -1 : place[own.parent];
    row.name = own.name;
    row.callable = own.callable;
    row.parameter_ids = own.parameter_ids;
    for (const auto id : row.parameter_ids) {
      row.parameter_bytes += static_cast<std::int64_t>(tree.parameters()[id].tensor.nbytes());
    }
    if (own.placed_at) row.placed_at = base::Partition(*own.placed_at);
    row.anywhere = runs_anywhere(own, cost);
    if (cost != nullptr) add_cost(row, *cost, place);
    rows.push_back(std::move(row));
  }
  join_sharers(tree, place, rows);
  return {std::move(rows), std::move(order)};
}

Plan plan_model(const ModuleTree& tree, const Costs& costs, const config::Config& config, int world_size,
                int partitions, const plan::KeptPartition& kept) {
  Plan plan;
  std::vector<int> nodes;
  std::tie(plan.rows, nodes) = plan_rows(tree, costs);
  for (auto& row : plan.rows) {
    row.parameter_bytes = 0;
    for (const auto id : row.parameter_ids) row.parameter_bytes += bytes_on_a_rank(tree.parameters()[id], config);
  }
  if (world_size == 1) {
    for (auto& row : plan.rows) row.placed_at.reset();
  }
  plan.report = plan::plan_for(config, plan.rows, kept);
  plan.table = plan::printed(plan.rows, plan.report, config);
  plan.owners.assign(nodes.size(), 0);
  for (std::size_t row = 0; row < nodes.size(); ++row) {
    if (partitions > 1) plan.owners[nodes[row]] = static_cast<int>(plan.report.owners[row].value);
    if (partitions > 1 && plan.rows[row].anywhere) plan.anywhere.push_back(nodes[row]);
  }
  std::ranges::sort(plan.anywhere);
  return plan;
}

}  // namespace lamina::model
