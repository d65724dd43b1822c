// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "lamina/plan/module_tree.h"

namespace lamina::plan {

// Disjoint groups of nodes, each known by its first node.
class Groups {
 public:
  explicit Groups(std::size_t size);

  int first(int node);
  void join(int a, int b);

 private:
  std::vector<int> parent_;
};

// Nodes that have to be owned together, directly or through a chain of others: those that share a parameter or say so,
// and a container that is never called, unless placed by hand, with the module that reads the parameters it holds.
Groups owned_together(const ModuleTree& tree);

}  // namespace lamina::plan
