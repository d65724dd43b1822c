// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lamina/plan/module_tree.h"

namespace lamina::plan {

// A module in a message: its name in quotation marks, or "the model itself".
std::string shown(const Node& node);

// Per partition, in module order, the fewest names that say what it owns. A module that is owned whole stands for all
// under it, and siblings numbered in a row are joined ("blocks.0-2"). "name (itself)" is a module that has some
// children elsewhere. Containers that are never called count for nothing. A root without a name is "model".
std::vector<std::vector<std::string>> owned_names(const ModuleTree& tree, const Assignment& owners, int partitions);

}  // namespace lamina::plan
