// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "lamina/plan/module_tree.h"
#include "lamina/plan/route.h"

namespace lamina::plan {

// [Note: items] What a planner moves is an item: nodes that are owned together. These are nodes that share parameters
// or have to be together; a container that is never called, and a module that neither computes nor holds anything, nor
// does what is under it, with its parent. A module that is called is an item with parameters or without: the value goes
// through it. One that only calls others is moved by nobody: it goes where the first of these is.
struct Items {
  std::vector<int> of;                                 // per node; items are numbered by their first node
  std::vector<int> first;                              // per item
  std::vector<std::optional<base::Partition>> placed;  // per item: by hand; the root's is in partition 0 in any case

  int size() const { return static_cast<int>(first.size()); }
  // Every node where its item is.
  Assignment spread(const std::vector<int>& owners) const;
};

// Throws base::ConfigError where placements by hand are impossible; see `check_placements`.
Items find_items(const ModuleTree& tree, const Route& route, int partitions);

}  // namespace lamina::plan
