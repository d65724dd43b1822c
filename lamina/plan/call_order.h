// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

namespace lamina::plan {

// The nodes of a tree in the order that a plan takes them in: parents before children, children in the order of their
// first calls. `parents` has -1 for the root, which is node 0, and `called` when a node was first called. A node that
// never was and holds others, such as a list of modules, comes where the first of these is called; others that never
// were come last, in the order of the tree.
std::vector<int> call_order(const std::vector<int>& parents, const std::vector<std::optional<int>>& called);

}  // namespace lamina::plan
