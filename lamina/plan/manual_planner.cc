// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/placement.h"
#include "lamina/plan/planner.h"

namespace lamina::plan {
namespace {

class Manual : public Planner {
 public:
  explicit Manual(base::Partition fallback) : fallback_(fallback) {}

  Assignment assign(const ModuleTree& tree, const Goal& goal) const override {
    const Placements placements = placements_by_hand(tree, fallback_);
    check_placements(tree, placements, goal.partitions);
    Assignment owners;
    for (const auto& placement : placements) owners.push_back(*placement);
    return owners;
  }

 private:
  const base::Partition fallback_;
};

}  // namespace

std::unique_ptr<Planner> manual_planner(base::Partition fallback) { return std::make_unique<Manual>(fallback); }

}  // namespace lamina::plan
