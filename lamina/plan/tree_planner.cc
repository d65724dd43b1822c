// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/planner.h"
#include "lamina/plan/tree_division.h"

namespace lamina::plan {
namespace {

class TreePlanner : public Planner {
 public:
  Assignment assign(const ModuleTree& tree, const Goal& goal) const override {
    if (tree.empty()) return {};
    const Problem problem(tree, goal);
    return problem.nodes(divide_tree(tree, problem));
  }
};

}  // namespace

std::unique_ptr<Planner> tree_planner() { return std::make_unique<TreePlanner>(); }

}  // namespace lamina::plan
