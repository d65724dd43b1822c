// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lamina/plan/module_tree.h"

namespace lamina::plan {

// Bytes of groups of nodes that have to be owned together (see `owned_together`): per node, where it is the first of
// its group, the bytes of the group's own parameters, each counted once; else 0. A parameter in several nodes has a
// known size only where some node holds nothing else; otherwise, in a node that shares some of its parameters, all of
// them count.
std::vector<std::int64_t> group_bytes(const ModuleTree& tree);

}  // namespace lamina::plan
