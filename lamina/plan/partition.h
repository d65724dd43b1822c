// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/plan/goal.h"

// Which rank owns which module.
namespace lamina::plan {

// One module of a tree. Nodes are numbered by their position, parents before children, children in the order in which
// they are called. Costs are per microbatch and without the children's.
struct Node {
  int parent = -1;                           // -1: the root, which is node 0
  std::string name;                          // the path from the root, "transformer.h.5"; the root's may be empty
  std::int64_t parameter_bytes = 0;          // of its own parameters, shared ones too
  std::vector<std::int64_t> parameter_ids;   // of its own parameters; an id in two nodes is a shared parameter
  bool callable = true;                      // false: a container that is never called, such as a list of modules
  std::optional<base::Partition> placed_at;  // by hand; nothing under it is then moved unless placed itself
  double forward_us = 0;
  double backward_us = 0;
  std::int64_t activation_bytes = 0;  // kept from its forward to its backward
  std::int64_t output_bytes = 0;
  std::vector<int> together;  // nodes that have to be owned with it for another reason than shared parameters
};

using ModuleTree = std::vector<Node>;
using Assignment = std::vector<base::Partition>;  // one per node

class Planner {
 public:
  virtual ~Planner() = default;
  // Every node gets one partition below goal.partitions; nodes that share a parameter, or have to be together, get the
  // same one. Equal input gives equal output.
  virtual Assignment assign(const ModuleTree& tree, const Goal& goal) const = 0;
};

// Both honour placements by hand, keep what [Note: items] says together, leave the root in partition 0, number
// partitions in the order in which a microbatch meets them, and throw base::ConfigError where placements by hand are
// impossible.

// The default: makes the predicted step ([Note: predicted step]) short and the fullest rank's memory small, as
// goal.memory_weight says, within goal.memory_limit_bytes. Its step is never longer than the tree planner's, nor, with
// free messages or a memory_weight of 0, than with fewer partitions. Throws base::ConfigError when it finds nothing
// that fits into memory. A tree of fewer modules than partitions leaves partitions empty.
std::unique_ptr<Planner> step_planner();

// The published algorithm (plan/tree_division.h), which the default is measured against. Ignores messages and the limit
// on memory.
std::unique_ptr<Planner> tree_planner();

// As placed by hand: the innermost placement above a node counts, else `fallback`. Throws base::ConfigError, with all
// that is wrong, when a placement is not below the number of partitions, or two nodes that share a parameter, or have
// to be together, are placed apart.
std::unique_ptr<Planner> manual_planner(base::Partition fallback);

}  // namespace lamina::plan
