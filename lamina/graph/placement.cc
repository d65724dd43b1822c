// SPDX-License-Identifier: Apache-2.0
#include "lamina/graph/placement.h"

#include <algorithm>
#include <map>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/plan/graph_plan.h"
#include "lamina/plan/groups.h"
#include "lamina/plan/plan_from_config.h"

namespace lamina::graph {
namespace {

// Operations that go together.
plan::NodeGroups tied(const std::vector<TracedOperation>& operations, bool layers) {
  plan::NodeGroups groups(operations.size());
  std::map<int, int> of_variable;
  std::map<std::string, int> of_layer;
  for (int i = 0; i < static_cast<int>(operations.size()); ++i) {
    for (const int variable : operations[i].variables)
      groups.join(i, of_variable.try_emplace(variable, i).first->second);
    for (const int other : operations[i].together) groups.join(i, other);
    const auto& layer = operations[i].layer;
    if (layers && !layer.empty()) groups.join(i, of_layer.try_emplace(layer, i).first->second);
  }
  return groups;
}

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
  plan::NodeGroups ties = tied(operations, /*layers=*/false);
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

void check(const TracedGraph& graph) {
  const auto& operations = graph.operations;
  const auto require = [](bool right, const auto&... words) {
    if (!right) throw base::ConfigError(base::str(words...));
  };
  const auto require_output = [&](const std::string& reader, const OperationOutput& read) {
    const bool is_there = read.operation >= 0 && read.operation < static_cast<int>(operations.size());
    require(is_there, reader, " reads operation ", read.operation, ", which is not there");
    const auto& maker = operations[read.operation];
    require(read.output >= 0 && read.output < static_cast<int>(maker.output_bytes.size()), reader, " reads output ",
            read.output, " of operation ", maker.name, ", which is not there");
  };
  for (int i = 0; i < static_cast<int>(operations.size()); ++i) {
    const auto name = base::str("operation ", operations[i].name);
    for (const auto bytes : operations[i].output_bytes)
      require(bytes >= 0, name, " has an output of ", bytes, " bytes");
    for (const OperationOutput& read : operations[i].inputs) {
      require_output(name, read);
      require(read.operation < i, name, " reads operation ", operations[read.operation].name, " before it is made");
    }
    for (const int variable : operations[i].variables) {
      require(variable >= 0 && variable < static_cast<int>(graph.variables.size()), name, " uses variable ", variable,
              ", which is not there");
    }
  }
  for (const OperationOutput& result : graph.results) require_output("what is outside", result);
}

// The items, and which of them each operation belongs to.
class ItemTree {
 public:
  explicit ItemTree(const TracedGraph& graph) : ties_(tied(graph.operations, /*layers=*/true)) {
    find_shared(graph);
    tree.push_back({.name = "model", .stretches = {{.reads = std::vector<plan::Read>{}}}});
    std::map<int, int> nodes;
    bool ended = true;  // the stretch before
    for (int i = 0; i < static_cast<int>(graph.operations.size()); ++i) {
      const auto& operation = graph.operations[i];
      const auto [found, is_new] = nodes.try_emplace(ties_.first(i), static_cast<int>(tree.size()));
      if (is_new) tree.push_back({.parent = 0, .name = name_of(operation)});
      auto& node = tree[found->second];
      if (ended || node_of.back() != found->second) begin(node);
      node_of.push_back(found->second);
      for (const OperationOutput& input : operation.inputs) read(node.stretches.back(), input, graph);
      add(node, operation, graph.variables);
      ended = make_values(node, i, operation.output_bytes);
    }
    begin(tree.front());
    for (const OperationOutput& result : graph.results) read(tree.front().stretches.back(), result, graph);
  }

  plan::ModuleTree tree;
  std::vector<int> node_of;  // per operation

 private:
  static std::string name_of(const TracedOperation& operation) {
    return operation.layer.empty() ? operation.name : operation.layer;
  }

  // Finds the outputs that other items, or what is outside, read.
  void find_shared(const TracedGraph& graph) {
    for (int i = 0; i < static_cast<int>(graph.operations.size()); ++i) {
      for (const OperationOutput& input : graph.operations[i].inputs) {
        if (ties_.first(input.operation) != ties_.first(i)) made_at_[input] = 0;
      }
    }
    for (const OperationOutput& result : graph.results) made_at_[result] = 0;
  }

  void begin(plan::Node& node) {
    node.stretches.push_back({.at = ++at_, .works = true, .reads = std::vector<plan::Read>{}});
  }

  void read(plan::Stretch& stretch, const OperationOutput& input, const TracedGraph& graph) const {
    const auto found = made_at_.find(input);
    if (found == made_at_.end()) return;
    const plan::Read read{found->second, graph.operations[input.operation].output_bytes[input.output]};
    if (std::ranges::count(*stretch.reads, read) == 0) stretch.reads->push_back(read);
  }

  // True where the operation makes any, which ends the stretch.
  bool make_values(plan::Node& node, int operation, const std::vector<std::int64_t>& bytes) {
    bool made = false;
    for (int output = 0; output < static_cast<int>(bytes.size()); ++output) {
      const auto found = made_at_.find({operation, output});
      if (found == made_at_.end()) continue;
      if (made) begin(node);
      node.stretches.back().value_bytes = bytes[output];
      node.output_bytes = bytes[output];
      found->second = at_;
      made = true;
    }
    return made;
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

  plan::NodeGroups ties_;
  std::map<OperationOutput, int> made_at_;  // outputs that are values: the places of their stretches
  int at_ = 0;
};

}  // namespace

plan::ModuleTree items(const TracedGraph& graph) {
  check(graph);
  return ItemTree(graph).tree;
}

Placement place(const TracedGraph& graph, const config::Config& config) {
  check(graph);
  if (!config.auto_partition) return {placed_by_hand(graph.operations, graph.variables, config), ""};
  const ItemTree items(graph);
  const auto report = plan::plan_graph_for(config, items.tree);
  Placement made;
  made.text = plan::printed(items.tree, report, config);
  for (const int node : items.node_of) made.partitions.push_back(report.owners[node]);
  return made;
}

}  // namespace lamina::graph
