// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/graph_plan.h"

#include "lamina/plan/check_memory.h"
#include "lamina/plan/fewest_bytes.h"
#include "lamina/plan/traffic.h"

namespace lamina::plan {
namespace {

class GraphPlanner : public Planner {
 public:
  Assignment assign(const ModuleTree& tree, const Goal& goal) const override {
    if (tree.empty()) return {};
    const Problem problem(tree, goal);
    const Assignment owners = problem.nodes(fewest_bytes(problem, Traffic::of_graph(problem.route, problem.items)));
    check_memory(tree, owners, goal);
    return owners;
  }
};

}  // namespace

std::unique_ptr<Planner> graph_planner() { return std::make_unique<GraphPlanner>(); }

Report report_graph(const ModuleTree& tree, const Assignment& owners, const Goal& goal) {
  Report result = report(tree, owners, goal);
  const Route route = find_route(tree);
  const Items items = find_items(tree, route, goal.partitions);
  std::vector<int> ranks;
  for (const int first : items.first) ranks.push_back(static_cast<int>(owners[first].value));
  const auto sent = Traffic::of_graph(route, items).sent_bytes(ranks, goal.partitions);
  for (int rank = 0; rank < goal.partitions; ++rank) result.stages[rank].out_bytes = sent[rank];
  return result;
}

}  // namespace lamina::plan
