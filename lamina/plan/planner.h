// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "lamina/plan/goal.h"
#include "lamina/plan/module_tree.h"

// Which rank owns which module.
namespace lamina::plan {

class Planner {
 public:
  virtual ~Planner() = default;
  // Every node gets one partition below goal.partitions; nodes that share a parameter, or have to be together, get the
  // same one. Equal input gives equal output.
  virtual Assignment assign(const ModuleTree& tree, const Goal& goal) const = 0;
};

// Both honour placements by hand, and throw base::ConfigError where these are impossible. They keep together what
// [Note: items] says, leave the root in partition 0, and number partitions in the order in which a microbatch meets
// them.

// The default: makes the step short and the fullest rank's memory small, as goal.memory_weight says, within
// goal.memory_limit_bytes. The step is that of [Note: predicted step] for a chain ([Note: chain]), of other trees that
// of the simulated schedule. It is never longer than the tree planner's nor, of a chain with a memory_weight of 0, than
// with fewer partitions. Where memory weighs, the parts of a chain are first made even in memory and time. Throws
// base::ConfigError when it finds nothing that fits into memory. A tree of fewer modules than partitions leaves
// partitions empty.
std::unique_ptr<Planner> step_planner();

// The published algorithm (plan/tree_division.h), which the default is measured against. Ignores messages and the limit
// on memory.
std::unique_ptr<Planner> tree_planner();

// As placed by hand: the innermost placement above a node counts, else `fallback`. Throws base::ConfigError, with all
// that is wrong, when a placement is not below the number of partitions, or two nodes that share a parameter, or have
// to be together, are placed apart.
std::unique_ptr<Planner> manual_planner(base::Partition fallback);

}  // namespace lamina::plan
