// SPDX-License-Identifier: Apache-2.0
#include "lamina/graph/placement.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/plan/plan_from_config.h"

namespace lamina::graph {
namespace {

// Operations that go together.
class Ties {
 public:
  explicit Ties(const std::vector<TracedOperation>& operations, bool layers) : parents_(operations.size()) {
    std::iota(parents_.begin(), parents_.end(), 0);
    std::map<int, int> of_variable;
    std::map<std::string, int> of_layer;
    for (int i = 0; i < static_cast<int>(operations.size()); ++i) {
      for (const int variable : operations[i].variables) join(i, of_variable.try_emplace(variable, i).first->second);
      for (const int other : operations[i].together) join(i, other);
      const auto& layer = operations[i].layer;
      if (layers && !layer.empty()) join(i, of_layer.try_emplace(layer, i).first->second);
    }
  }

  int first(int operation) const {
    while (parents_[operation] != operation) operation = parents_[operation];
    return operation;
  }

 private:
  void join(int one, int other) {
    one = first(one);
    other = first(other);
    parents_[std::max(one, other)] = std::min(one, other);
  }

  std::vector<int> parents_;
};

// Why the two are tied, as a clause.
std::string tie_between(const std::vector<TracedOperation>& operations, const std::vector<Variable>& variables, int one,
                        int other) {
  for (const int variable : operations[one].variables) {
    if (std::ranges::count(operations[other].variables, variable) > 0) {
      return base::str("both use the variable ", variables[variable].name);
    }
  }
  return "variables that both use, or constraints of colocation, tie them";
}

std::vector<base::Partition> placed_by_hand(const std::vector<TracedOperation>& operations,
                                            const std::vector<Variable>& variables, const config::Config& config) {
  const Ties ties(operations, /*layers=*/false);
  std::map<int, int> placed;  // per first of those that are tied: an operation that was placed
  for (int i = 0; i < static_cast<int>(operations.size()); ++i) {
    const auto at = operations[i].placed_at;
    if (!at) continue;
    if (*at < 0 || *at >= config.partitions) {
      throw base::ConfigError(
          base::str("operation ", operations[i].name, " is placed on partition ", *at, " of ", config.partitions));
    }
    const int before = placed.try_emplace(ties.first(i), i).first->second;
    if (operations[before].placed_at != at) {
      throw base::ConfigError(base::str("operation ", operations[before].name, " is placed on partition ",
                                        *operations[before].placed_at, ", and ", operations[i].name, " on ", *at,
                                        ", but ", tie_between(operations, variables, before, i),
                                        "; place them on one partition"));
    }
  }
  std::vector<base::Partition> partitions;
  for (int i = 0; i < static_cast<int>(operations.size()); ++i) {
    const auto found = placed.find(ties.first(i));
    const auto at = found == placed.end() ? config.default_partition.value_or(0) : *operations[found->second].placed_at;
    partitions.emplace_back(at);
  }
  return partitions;
}

// Per operation: the bytes that live behind it.
std::vector<std::int64_t> bytes_behind(const std::vector<TracedOperation>& operations) {
  std::vector<int> last(operations.size());
  for (int i = 0; i < static_cast<int>(operations.size()); ++i) {
    last[i] = i;
    for (const int input : operations[i].inputs) last[input] = i;
  }
  std::vector<std::int64_t> begins(operations.size() + 1), bytes(operations.size());
  for (std::size_t i = 0; i < operations.size(); ++i) {
    begins[i] += operations[i].output_bytes;
    begins[last[i]] -= operations[i].output_bytes;
  }
  std::partial_sum(begins.begin(), begins.end() - 1, bytes.begin());
  return bytes;
}

// The items, and which of them each operation belongs to.
struct ItemTree {
  plan::ModuleTree tree;
  std::vector<int> node_of;  // per operation

  ItemTree(const std::vector<TracedOperation>& operations, const std::vector<Variable>& variables) {
    const Ties ties(operations, /*layers=*/true);
    const auto bytes = bytes_behind(operations);
    tree.push_back({.name = "model", .stretches = {{}}});
    std::map<int, int> nodes;
    int at = 0;
    for (int i = 0; i < static_cast<int>(operations.size()); ++i) {
      const auto [found, is_new] = nodes.try_emplace(ties.first(i), static_cast<int>(tree.size()));
      if (is_new) tree.push_back({.parent = 0, .name = name_of(operations[i])});
      auto& node = tree[found->second];
      if (is_new || node_of.back() != found->second) node.stretches.push_back({.at = ++at, .works = true});
      node_of.push_back(found->second);
      add(node, operations[i], variables);
      node.stretches.back().value_bytes = bytes[i];
    }
    for (auto& node : tree) {
      if (!node.stretches.empty()) node.output_bytes = node.stretches.back().value_bytes;
    }
  }

 private:
  static std::string name_of(const TracedOperation& operation) {
    return operation.layer.empty() ? operation.name : operation.layer;
  }

  static void add(plan::Node& node, const TracedOperation& operation, const std::vector<Variable>& variables) {
    if (operation.placed_at) node.placed_at = base::Partition(*operation.placed_at);
    double work = 1;
    for (const int variable : operation.variables) {
      if (std::ranges::count(node.parameter_ids, variable) > 0) continue;
      node.parameter_ids.push_back(variable);
      node.parameter_bytes += variables[variable].size_bytes;
      work += 1;
    }
    for (double* time : {&node.forward_us, &node.stretches.back().forward_us}) *time += work;
    for (double* time : {&node.backward_us, &node.stretches.back().backward_us}) *time += 2 * work;
  }
};

}  // namespace

plan::ModuleTree items(const std::vector<TracedOperation>& operations, const std::vector<Variable>& variables) {
  return ItemTree(operations, variables).tree;
}

Placement place(const std::vector<TracedOperation>& operations, const std::vector<Variable>& variables,
                const config::Config& config) {
  if (!config.auto_partition) return {placed_by_hand(operations, variables, config), ""};
  const ItemTree items(operations, variables);
  const auto report = plan::plan_for(config, items.tree);
  Placement made;
  made.text = plan::printed(items.tree, report, config);
  for (const int node : items.node_of) made.partitions.push_back(report.owners[node]);
  return made;
}

}  // namespace lamina::graph
