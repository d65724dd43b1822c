// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/route.h"

#include <algorithm>
#include <set>

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
    if (std::ranges::any_of(tree_, [](const Node& node) { return !node.stretches.empty(); })) {
      follow_stretches();
    } else if (!tree_.empty()) {
      visit(0);
    }
    find_ends();
    return std::move(route_);
  }

 private:
  void follow_stretches() {
    const std::vector<bool> computes = computing();
    std::vector<std::pair<int, int>> order;  // place, node
    for (int node = 0; node < static_cast<int>(tree_.size()); ++node) {
      for (const Stretch& own : tree_[node].stretches) order.emplace_back(own.at, node);
    }
    std::ranges::sort(order);
    for (const auto& [at, node] : order) {
      const Stretch& own = *std::ranges::find(tree_[node].stretches, at, &Stretch::at);
      auto& points = route_.points;
      if (computes[node]) points.push_back({node, own.forward_us, own.backward_us, 0});
      if (!points.empty()) points.back().value_bytes = own.value_bytes;
    }
  }

  // Per node, whether it is more than a container whose modules are called: then values come to it.
  std::vector<bool> computing() const {
    std::vector<bool> calls(tree_.size());  // a module under it
    std::vector<bool> computes(tree_.size());
    for (std::size_t node = tree_.size(); node-- > 0;) {
      const Node& module = tree_[node];
      const bool called = !module.stretches.empty();
      computes[node] = called && (!calls[node] || std::ranges::any_of(module.stretches, &Stretch::works));
      if (module.parent >= 0 && (called || calls[node])) calls[module.parent] = true;
    }
    return computes;
  }

  void visit(int node) {
    const Node& module = tree_[node];
    if (children_[node].empty()) {
      if (!module.callable || module.anywhere || idle(module)) return;
      value_bytes_ = module.output_bytes;
      compute(node, 1);
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

  // A module around a point and not around the next one has ended in between.
  void find_ends() {
    auto& points = route_.points;
    for (std::size_t at = 0; at < points.size(); ++at) {
      std::set<int> around_next;
      for (int node = at + 1 < points.size() ? points[at + 1].node : 0; node >= 0; node = tree_[node].parent)
        around_next.insert(node);
      for (int node = tree_[points[at].node].parent; node >= 0 && !around_next.contains(node);
           node = tree_[node].parent) {
        if (tree_[node].callable) points[at].ends.push_back(node);
      }
    }
  }

  // Where times are known, a module that has none, returns nothing and learns nothing was not called.
  bool idle(const Node& node) const {
    return route_.timed && forward(node) + backward(node) + bytes(node) == 0 && node.output_bytes == 0;
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
