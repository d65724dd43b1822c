// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"

// Which rank owns which module.
namespace lamina::plan {

// One module of a tree. Nodes are numbered by their position, parents before children, children in their order.
struct Node {
  int parent = -1;  // -1: the root, which is node 0
  std::string name;
  std::int64_t parameter_bytes = 0;          // of its own parameters, without its children's
  std::vector<std::int64_t> parameter_ids;   // of its own parameters; an id in two nodes is a shared parameter
  bool callable = true;                      // false: a container that is never called, such as a list of modules
  std::optional<base::Partition> placed_at;  // by hand; nothing under it is then moved unless placed itself
};

using ModuleTree = std::vector<Node>;
using Assignment = std::vector<base::Partition>;  // one per node

class Planner {
 public:
  virtual ~Planner() = default;
  // Every node gets one partition below `partitions`; nodes that share a parameter get the same one.
  virtual Assignment assign(const ModuleTree& tree, int partitions) const = 0;
};

// Contiguous in module order, balanced by parameter bytes; ignores placements by hand.
std::unique_ptr<Planner> contiguous_planner();

// As placed by hand: the innermost placement above a node counts, else `fallback`. Throws base::ConfigError when a
// placement is not below the number of partitions, or two nodes that share a parameter are placed apart.
std::unique_ptr<Planner> manual_planner(base::Partition fallback);

// The assignment as the table that is printed at the first step: a row per partition with its parameters, bytes and
// modules.
std::string describe(const ModuleTree& tree, const Assignment& owners, int partitions);

}  // namespace lamina::plan
