// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lamina/frontend/module_tree.h"
#include "lamina/plan/module_tree.h"
#include "lamina/value/value.h"

// Costs of the modules of a torch::nn model, found out by running it.
namespace lamina::frontend {

// A call of the model.
struct Example {
  std::int64_t kind = 0;  // see [Note: call kinds]
  value::Value arguments;
};

// Costs of one node, its children's left out.
struct Cost {
  std::optional<int> order;  // when it was first called; not at all
  int calls = 0;
  double forward_us = 0;
  std::int64_t activation_bytes = 0;  // of what its operations return
  std::int64_t output_bytes = 0;
  std::set<int> reads;  // nodes whose parameters its operations read
  std::vector<plan::Stretch> stretches;
};

// Runs the model on copies of the example's arguments, a few times and without gradients, in this thread; the shortest
// forward of each module counts, and its backward for twice that. Buffers and random numbers are left as they were.
// Throws what the model throws.
std::vector<Cost> trace(const ModuleTree& tree, const Example& example);

// The tree as the planner takes it, children in the order in which they were called, and the node each row stands for.
// Without costs it is cut by the bytes of its parameters. `scopes_count`: whether Partition places modules.
std::pair<plan::ModuleTree, std::vector<int>> planned_tree(const ModuleTree& tree,
                                                           const std::optional<std::vector<Cost>>& costs,
                                                           bool scopes_count);

}  // namespace lamina::frontend
