// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/config/config.h"
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
  std::vector<int> inputs;       // operations
  std::vector<int> variables;    // that it uses, by number
  std::string layer;             // the innermost one of the model's layers that it is of; "" for none
  std::vector<int> together;     // operations that the library wants on the same device
  std::optional<int> placed_at;  // by hand, or since its variable has a partition already
  std::int64_t output_bytes = 0;
};

// [Note: items of a graph] Operations that use one variable are on one partition, and those that the library wants
// together; where a plan is made, those of one layer are, too. Placed by hand, each goes where it was placed, or where
// those are that it is tied to; else to `default_partition`.
//
// A plan balances the number of operations and variables, and the bytes of variables, as `memory_weight` says. A
// microbatch meets the items in the order of their operations: what lives between two of these is what a rank would
// send another.
struct Placement {
  std::vector<base::Partition> partitions;  // per operation
  std::string text;                         // of the plan, as it is printed; "" by hand
};

// The items as the planners take a model: a root that only passes on, and a node for each item. Times count operations
// and variables.
plan::ModuleTree items(const std::vector<TracedOperation>& operations, const std::vector<Variable>& variables);

// Throws base::ConfigError for placements by hand that are impossible, with the names of what is tied.
Placement place(const std::vector<TracedOperation>& operations, const std::vector<Variable>& variables,
                const config::Config& config);

}  // namespace lamina::graph
