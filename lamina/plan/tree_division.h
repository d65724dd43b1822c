// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "lamina/plan/problem.h"

namespace lamina::plan {

// Partitions for segments by their cost, after D'Hondt: each in turn goes to the segment that has most cost per
// partition if it got one more.
std::vector<std::vector<int>> share_out(const std::vector<int>& partitions, const std::vector<std::int64_t>& costs);

// The published way to cut a tree of modules (arXiv 2111.05972, section 3), from the root down. Children in their order
// are cut into contiguous segments, so that the costliest one is as cheap as can be. Segments share out the partitions
// of their parent by D'Hondt. The cost of a module is memory and time, each as a part of the whole, mixed by the goal's
// memory_weight. Returns owners of items.
std::vector<int> divide_tree(const ModuleTree& tree, const Problem& problem);

}  // namespace lamina::plan
