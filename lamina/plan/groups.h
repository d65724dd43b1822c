// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "lamina/plan/module_tree.h"

namespace lamina::plan {

// Disjoint groups of nodes, each known by its first node.
class NodeGroups {
 public:
  explicit NodeGroups(std::size_t size);

  int first(int node);
  void join(int a, int b);

 private:
  std::vector<int> parent_;
};

// Nodes that have to be owned together, directly or through a chain of others. Nodes that share a parameter are, and
// those that say so. A container that is never called goes with the module that reads its parameters, unless it is
// placed by hand.
NodeGroups owned_together(const ModuleTree& tree);

}  // namespace lamina::plan
