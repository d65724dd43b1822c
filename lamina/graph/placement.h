// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/config/config.h"
#include "lamina/graph/segments.h"
#include "lamina/plan/module_tree.h"

namespace lamina::graph {

// A variable of a model.
struct Variable {
  std::string name;
  std::int64_t size_bytes = 0;
};

// An operation of a graph as a face has traced it, in an order in which each follows what it reads.
struct TracedOperation {
  std::string name;
  std::vector<OperationOutput> inputs;
  std::vector<int> variables;              // that it uses, by number
  std::string layer;                       // the innermost one of the model's layers that it is of; "" for none
  std::vector<int> together;               // operations that the library wants on the same device
  std::optional<int> placed_at;            // by hand, or since its variable has a partition already
  std::vector<std::int64_t> output_bytes;  // of each of its outputs
};

// [Note: items of a graph] Operations that use one variable are on one partition, and those that the library wants
// together; where a plan is made, those of one layer are, too. Placed by hand, each goes where it was placed, or where
// those are that it is tied to; else to `default_partition`.
//
// A plan balances the number of operations and variables, and the bytes of variables, as `memory_weight` says, and has
// few bytes go between ranks ([Note: traffic] in plan/traffic.h). An output that another item reads is a value. A
// microbatch meets the items in the order of their operations.
struct Placement {
  std::vector<base::Partition> partitions;  // per operation
  std::string text;                         // of the plan, as it is printed; "" by hand
};

// A graph with what its call returns.
struct TracedGraph {
  std::vector<TracedOperation> operations;
  std::vector<Variable> variables;
  std::vector<OperationOutput> results{};
};

// The items as the planners take a model: a node for each, and a root that reads the results. Each of their stretches
// makes one value, and a stretch of no time each further one of an operation. Times count operations and variables.
// Throws base::ConfigError for an operation that reads what is not there, or not before it, and for negative bytes.
plan::ModuleTree items(const TracedGraph& graph);

// Throws base::ConfigError also for placements by hand that are impossible, with the names of what is tied.
Placement place(const TracedGraph& graph, const config::Config& config);

}  // namespace lamina::graph
