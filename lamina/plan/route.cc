// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/route.h"

#include <algorithm>

namespace lamina::plan {
namespace {

class Walk {
 public:
  explicit Walk(const ModuleTree& tree) : tree_(tree), children_(tree.size()) {
    for (std::size_t node = 1; node < tree.size(); ++node)
      children_[tree[node].parent].push_back(static_cast<int>(node));
    const auto has_time = [](const Node& node) { return node.forward_us + node.backward_us > 0; };
    route_.timed = std::ranges::any_of(tree, has_time);
  }

  Route run() {
    if (!tree_.empty()) visit(0);
    return std::move(route_);
  }

 private:
  void visit(int node) {
    const Node& module = tree_[node];
    if (children_[node].empty()) {
      value_bytes_ = module.output_bytes;
      if (module.callable) compute(node, 1);
      return;
    }
    const bool works = forward(module) + backward(module) > 0 || !module.parameter_ids.empty();
    if (works) compute(node, 0.5);
    for (int child : children_[node]) visit(child);
    if (!works) return;
    value_bytes_ = std::max(module.output_bytes, value_bytes_);
    compute(node, 0.5);
  }

  void compute(int node, double share) {
    const Node& module = tree_[node];
    route_.points.push_back({node, share * forward(module), share * backward(module), value_bytes_});
  }

  double forward(const Node& node) const { return route_.timed ? node.forward_us : bytes(node) / 3; }
  double backward(const Node& node) const { return route_.timed ? node.backward_us : bytes(node) * 2 / 3; }
  static double bytes(const Node& node) { return static_cast<double>(node.parameter_bytes + node.activation_bytes); }

  const ModuleTree& tree_;
  std::vector<std::vector<int>> children_;
  std::int64_t value_bytes_ = 0;
  Route route_;
};

}  // namespace

Route find_route(const ModuleTree& tree) { return Walk(tree).run(); }

}  // namespace lamina::plan
