// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "lamina/plan/module_tree.h"

namespace lamina::plan {

// [Note: items] What a planner moves is an item: nodes that are owned together. These are nodes that share parameters
// or have to be together; a module without parameters under it, and a container that is never called, with its parent.
// (A tree without any parameters is cut as if every module had some.)
struct Items {
  std::vector<int> of;                                 // per node; items are numbered by their first node
  std::vector<int> first;                              // per item
  std::vector<std::optional<base::Partition>> placed;  // per item: by hand; the root's is in partition 0 in any case

  int size() const { return static_cast<int>(first.size()); }
  // Every node where its item is.
  Assignment spread(const std::vector<int>& owners) const;
};

// Throws base::ConfigError where placements by hand are impossible; see `check_placements`.
Items find_items(const ModuleTree& tree, int partitions);

}  // namespace lamina::plan
