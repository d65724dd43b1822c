// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <utility>

#include "lamina/base/problems.h"
#include "lamina/base/str.h"
#include "lamina/plan/partition.h"

namespace lamina::plan {
namespace {

std::string shown(const Node& node) {
  return node.name.empty() ? "the model itself" : base::str("\"", node.name, "\"");
}

class Manual : public Planner {
 public:
  explicit Manual(base::Partition fallback) : fallback_(fallback) {}

  Assignment assign(const ModuleTree& tree, const Goal& goal) const override {
    Assignment owners;
    for (const Node& node : tree) {
      const base::Partition inherited = node.parent < 0 ? fallback_ : owners[node.parent];
      owners.push_back(node.placed_at.value_or(inherited));
    }
    base::Problems problems;
    check_range(tree, goal.partitions, problems);
    check_shared(tree, owners, problems);
    problems.raise("placement of modules by hand");
    return owners;
  }

 private:
  void check_range(const ModuleTree& tree, int partitions, base::Problems& problems) const {
    const auto check = [&](base::Partition partition, const std::string& what, const char* remedy) {
      if (partition.value >= 0 && partition.value < partitions) return;
      problems.add(what, base::str(what, " is in partition ", partition, ", but the partitions are 0 to ",
                                   partitions - 1, "; ", remedy));
    };
    check(fallback_, "what is not placed by hand", "set another default partition or more partitions");
    for (const Node& node : tree) {
      if (node.placed_at) check(*node.placed_at, shown(node), "place it in one of these or set more partitions");
    }
  }

  // One line per pair of modules, however many parameters they share.
  static void check_shared(const ModuleTree& tree, const Assignment& owners, base::Problems& problems) {
    std::map<std::int64_t, std::size_t> holder;
    for (std::size_t node = 0; node < tree.size(); ++node) {
      for (std::int64_t id : tree[node].parameter_ids) {
        const std::size_t first = holder.try_emplace(id, node).first->second;
        if (owners[first] == owners[node]) continue;
        const std::string pair = base::str(shown(tree[first]), " and ", shown(tree[node]));
        if (problems.concern(pair)) continue;
        problems.add(pair, base::str(pair, " share a parameter, but are in partitions ", owners[first], " and ",
                                     owners[node], "; place both in the same one"));
      }
    }
  }

  const base::Partition fallback_;
};

}  // namespace

std::unique_ptr<Planner> manual_planner(base::Partition fallback) { return std::make_unique<Manual>(fallback); }

}  // namespace lamina::plan
