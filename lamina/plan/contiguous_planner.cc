// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/division.h"
#include "lamina/plan/partition.h"
#include "lamina/plan/units.h"

namespace lamina::plan {
namespace {

// Per node the partition of its unit; -1 where the node is no unit and heads none.
std::vector<int> owners_of_units(const Division& division, std::size_t nodes) {
  std::vector<int> owner(nodes, -1);
  std::size_t at = 0;
  for (std::size_t segment = 0; segment < division.cut.ends.size(); ++segment) {
    for (; at < division.cut.ends[segment]; ++at) {
      const Unit& unit = division.units[at];
      owner[unit.node] = static_cast<int>(segment);
      for (int head : unit.heads) owner[head] = static_cast<int>(segment);
    }
  }
  return owner;
}

// The rest follows the units: what is under them or has no parameters its parent, sharing nodes their group, and
// modules all of whose parameters count elsewhere the first of these.
void follow(const ModuleTree& tree, const WeighedTree& weighed, std::vector<int>& owner) {
  const int size = static_cast<int>(tree.size());
  for (int node = 1; node < size; ++node) {
    if (owner[node] < 0) owner[node] = owner[tree[node].parent];
  }
  for (int node = 1; node < size; ++node) {
    const int holder = weighed.first_holder(node);
    if (weighed.group(node) != node) {
      owner[node] = owner[weighed.group(node)];
    } else if (holder < 0 || !tree[node].callable) {
      owner[node] = owner[tree[node].parent];
    } else if (weighed.bytes(node) == 0) {
      owner[node] = owner[weighed.group(holder)];
    }
  }
}

class Contiguous : public Planner {
 public:
  Assignment assign(const ModuleTree& tree, const Goal& goal) const override {
    if (tree.empty()) return {};
    const WeighedTree weighed(tree);
    std::vector<int> owner = owners_of_units(divide(weighed, goal.partitions), tree.size());
    follow(tree, weighed, owner);
    return Assignment(owner.begin(), owner.end());
  }
};

}  // namespace

std::unique_ptr<Planner> contiguous_planner() { return std::make_unique<Contiguous>(); }

}  // namespace lamina::plan
