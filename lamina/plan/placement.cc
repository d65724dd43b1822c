// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/placement.h"

#include <map>
#include <utility>

#include "lamina/base/str.h"
#include "lamina/config/problems.h"
#include "lamina/plan/owned_names.h"

namespace lamina::plan {
namespace {

class Check {
 public:
  Check(const ModuleTree& tree, const Placements& placements) : tree_(tree), placements_(placements) {}

  void range(int partitions) {
    const auto check = [&](base::Partition partition, const std::string& what, const char* remedy) {
      if (partition.value >= 0 && partition.value < partitions) return;
      problems_.add(what, base::str(what, " is in partition ", partition, ", but the partitions are 0 to ",
                                    partitions - 1, "; ", remedy));
    };
    if (!tree_.empty() && placements_[0] && !tree_[0].placed_at) {
      check(*placements_[0], "what is not placed by hand", "set another default partition or more partitions");
    }
    for (const Node& node : tree_) {
      if (node.placed_at) check(*node.placed_at, shown(node), "place it in one of these or set more partitions");
    }
  }

  void sharing() {
    std::map<std::int64_t, std::size_t> holder;
    for (std::size_t node = 0; node < tree_.size(); ++node) {
      for (std::int64_t id : tree_[node].parameter_ids) {
        const auto [found, is_new] = holder.try_emplace(id, node);
        if (!placements_[found->second]) found->second = node;
        same(found->second, node, "share a parameter");
      }
      for (int other : tree_[node].together) same(other, node, "have to be together");
    }
  }

  void raise() const { problems_.raise("placement of modules by hand"); }

 private:
  // One line per pair of modules, however much they share.
  void same(std::size_t first, std::size_t second, const char* reason) {
    const auto& one = placements_[first];
    const auto& other = placements_[second];
    if (!one || !other || *one == *other) return;
    const std::string pair = base::str(shown(tree_[first]), " and ", shown(tree_[second]));
    if (problems_.concern(pair)) return;
    problems_.add(pair, base::str(pair, " ", reason, ", but are in partitions ", *one, " and ", *other,
                                  "; place both in the same one"));
  }

  const ModuleTree& tree_;
  const Placements& placements_;
  config::Problems problems_;
};

}  // namespace

Placements placements_by_hand(const ModuleTree& tree, std::optional<base::Partition> fallback) {
  Placements placements;
  placements.reserve(tree.size());
  for (const Node& node : tree) {
    const auto inherited = node.parent < 0 ? fallback : placements[node.parent];
    placements.push_back(node.placed_at ? node.placed_at : inherited);
  }
  return placements;
}

void check_placements(const ModuleTree& tree, const Placements& placements, int partitions) {
  Check check(tree, placements);
  check.range(partitions);
  check.sharing();
  check.raise();
}

}  // namespace lamina::plan
