// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lamina/plan/partition.h"

namespace lamina::plan {

// What groups of nodes hold that have to be owned together; see `owned_together`.
struct Sharing {
  std::vector<int> first;           // per node: the first node, in node order, of its group
  std::vector<std::int64_t> bytes;  // per node: its group's own parameters, each counted once; 0 unless the first
};

// A parameter in several nodes has a known size only where some node holds nothing else; otherwise, in a node that
// shares some of its parameters, all of them count.
Sharing find_sharing(const ModuleTree& tree);

}  // namespace lamina::plan
