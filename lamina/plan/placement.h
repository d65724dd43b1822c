// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "lamina/plan/module_tree.h"

namespace lamina::plan {

using Placements = std::vector<std::optional<base::Partition>>;  // per node

// Per node the innermost placement by hand at it or above it, else `fallback`.
Placements placements_by_hand(const ModuleTree& tree, std::optional<base::Partition> fallback);

// Throws base::ConfigError, with all that is wrong, when a placement is not below `partitions`, or two nodes that share
// a parameter, or have to be together, are placed apart.
void check_placements(const ModuleTree& tree, const Placements& placements, int partitions);

}  // namespace lamina::plan
