// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lamina/config/config.h"
#include "lamina/model/module_tree.h"
#include "lamina/plan/kept_partition.h"
#include "lamina/plan/report.h"

namespace lamina::model {

// Costs of one microbatch in a node, its children left out, as a face's trace has seen it.
struct Cost {
  std::optional<int> order;  // when it was first called; none: not at all
  int calls = 0;
  double forward_us = 0;
  double backward_us = 0;
  std::int64_t activation_bytes = 0;     // kept from its forward to its backward
  std::int64_t output_bytes = 0;         // of what its calls return
  std::set<int> reads;                   // nodes whose tensors its operations read
  std::set<int> ties;                    // nodes with which it shares attributes
  std::vector<plan::Stretch> stretches;  // proportions of forward_us and backward_us; absolute values are ignored
};
using Costs = std::optional<std::vector<Cost>>;  // by node; none: the model is cut by the bytes of its parameters

// The rows of a plan, children in the order of their first calls, and the node that each row stands for.
std::pair<plan::ModuleTree, std::vector<int>> plan_rows(const ModuleTree& tree, const Costs& costs);

// The plan: who is to own what.
struct Plan {
  std::vector<int> owners;    // per node, its partition
  std::vector<int> anywhere;  // nodes that run where their argument lies, see [Note: anywhere] in remote/anywhere.h
  std::string table;          // as it is printed
  plan::ModuleTree rows;
  plan::Report report;  // of these
};

// Plans as the configuration asks. With one rank, or one partition, everything is placed there and manual placement is
// ignored. `kept`: see plan::plan_for. Throws as that does.
Plan plan_model(const ModuleTree& tree, const Costs& costs, const config::Config& config, int world_size,
                int partitions, const plan::KeptPartition& kept = {});

}  // namespace lamina::model
