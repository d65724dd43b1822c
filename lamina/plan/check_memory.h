// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/plan/goal.h"
#include "lamina/plan/module_tree.h"

namespace lamina::plan {

// Throws base::ConfigError where a partition needs more memory than the goal allows. It names the partition, the amount
// that is missing, and the largest module there.
void check_memory(const ModuleTree& tree, const Assignment& owners, const Goal& goal);

}  // namespace lamina::plan
