// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/route.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace lamina::plan {
namespace {

constexpr int kBefore = -1;  // the point before

class Walk {
 public:
  explicit Walk(const ModuleTree& tree) : tree_(tree), children_(tree.size()) {
    for (std::size_t node = 1; node < tree.size(); ++node)
      children_[tree[node].parent].push_back(static_cast<int>(node));
    const auto has_time = [](const Node& node) { return node.forward_us + node.backward_us > 0; };
    route_.timed = std::ranges::any_of(tree, has_time);
  }

  Route run() {
    if (tree_.empty()) return std::move(route_);
    route_.calls.push_back({0, -1});
    if (std::ranges::any_of(tree_, [](const Node& node) { return !node.stretches.empty(); })) {
      follow_stretches();
    } else {
      visit(0, -1);
    }
    read_in_order();
    find_results();
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
    std::unordered_map<int, int> point_at;  // by place
    int call = 0, before = -1;              // and the node of the stretch before
    for (const auto& [at, node] : order) {
      const Stretch& own = *std::ranges::find(tree_[node].stretches, at, &Stretch::at);
      call = next_call(call, node, own.works && node != before);
      before = node;
      auto& points = route_.points;
      if (computes[node]) {
        point_at[at] = static_cast<int>(points.size());
        points.push_back({node, own.forward_us, own.backward_us, 0, own.weights_us, call});
        makes_.push_back(own.works);
        read(points.back(), own, point_at);
      }
      if (!points.empty()) points.back().value_bytes = own.value_bytes;
    }
  }

  // The call of a node that a stretch belongs to, after one of `call`. A call that goes on after one that it has made
  // does some work there; the first stretch of a call may do nothing.
  int next_call(int call, int node, bool may_go_on) {
    const auto& calls = route_.calls;
    for (int open = call; may_go_on && open >= 0; open = calls[open].caller) {
      if (calls[open].node == node) return open;
    }
    if (node == 0) return 0;
    while (call > 0 && !is_under(node, calls[call].node)) call = calls[call].caller;
    route_.calls.push_back({node, call});
    return static_cast<int>(calls.size()) - 1;
  }

  bool is_under(int node, int other) const {
    do node = tree_[node].parent;
    while (node > other);
    return node == other;
  }

  static void read(Point& point, const Stretch& own, const std::unordered_map<int, int>& point_at) {
    if (!own.reads) {
      point.reads.push_back({kBefore, 0});
      return;
    }
    for (const Read& read : *own.reads) {
      const auto found = point_at.find(read.at);
      if (found != point_at.end()) point.reads.push_back({found->second, read.bytes});
    }
  }

  // A point of which nothing is known reads what the one before it hands on.
  void read_in_order() {
    auto& points = route_.points;
    for (int at = 0; at < static_cast<int>(points.size()); ++at) {
      if (points[at].reads.empty() || points[at].reads.front().point != kBefore) continue;
      points[at].reads.clear();
      if (at > 0) points[at].reads.push_back({at - 1, points[at - 1].value_bytes});
    }
  }

  void find_results() {
    const auto& points = route_.points;
    std::vector<bool> read(points.size());
    for (const Point& point : points) {
      for (const RouteSource& source : point.reads) read[source.point] = true;
    }
    for (int at = 0; at < static_cast<int>(points.size()); ++at) {
      if ((!read[at] && makes_[at]) || at + 1 == static_cast<int>(points.size()))
        route_.results.push_back({at, points[at].value_bytes});
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

  void visit(int node, int caller) {
    const Node& module = tree_[node];
    const bool is_leaf = children_[node].empty();
    if (is_leaf && (!module.callable || module.anywhere || idle(module))) return;
    const bool works = forward(module) + backward(module) > 0 || !module.parameter_ids.empty();
    const int call = begin_call(node, caller, module.callable || works);
    if (is_leaf) {
      value_bytes_ = module.output_bytes;
      compute(node, 1, call);
      return;
    }
    if (works) compute(node, 0.5, call);
    for (int child : children_[node]) visit(child, call);
    if (!works) return;
    value_bytes_ = std::max(module.output_bytes, value_bytes_);
    compute(node, 0.5, call);
  }

  int begin_call(int node, int caller, bool is_call) {
    if (caller < 0) return 0;  // the root's, which is there
    if (!is_call) return caller;
    route_.calls.push_back({node, caller});
    return static_cast<int>(route_.calls.size()) - 1;
  }

  void compute(int node, double share, int call) {
    const Node& module = tree_[node];
    route_.points.push_back({node, share * forward(module), share * backward(module), value_bytes_, {}, call});
    makes_.push_back(true);
    route_.points.back().reads.push_back({kBefore, 0});
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
  std::vector<bool> makes_;  // per point: a value; a call that begins with one of another module makes none there
  Route route_;
};

}  // namespace

Route find_route(const ModuleTree& tree) { return Walk(tree).run(); }

}  // namespace lamina::plan
