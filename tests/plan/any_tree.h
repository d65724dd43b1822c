// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <rapidcheck.h>

#include <string>

#include "lamina/plan/goal.h"
#include "lamina/plan/module_tree.h"
#include "lamina/plan/report.h"

// Random trees and goals for properties.
namespace lamina::plan {

struct Kind {
  int most_nodes = 40;
  int depth_changes = 4;  // how far up the next node's parent may be
  bool sharing = true;    // parameters are drawn from few ids
  bool containers = true;
};

// Parameter `id` has id + 1 bytes, so that the parameters of different nodes agree on their sizes.
inline void give_parameters(Node& node, const std::vector<std::int64_t>& ids) {
  node.parameter_ids = ids;
  for (std::int64_t id : ids) node.parameter_bytes += id + 1;
}

inline void give_costs(Node& node) {
  node.forward_us = *rc::gen::inRange(0, 100);
  node.backward_us = *rc::gen::inRange(0, 200);
  node.activation_bytes = *rc::gen::inRange(0, 100);
  node.output_bytes = *rc::gen::inRange(0, 100);
}

// Any tree, depth first.
inline ModuleTree any_tree(const Kind& kind) {
  ModuleTree tree(1);
  const int size = *rc::gen::inRange(1, kind.most_nodes).as("nodes");
  for (int at = 1; at < size; ++at) {
    int parent = at - 1;
    for (int up = *rc::gen::inRange(0, kind.depth_changes); up > 0 && parent > 0; --up) parent = tree[parent].parent;
    Node node;
    node.parent = parent;
    node.name = "m." + std::to_string(at);
    node.callable = !kind.containers || *rc::gen::inRange(0, 5) > 0;
    const int count = *rc::gen::inRange(0, 3);
    std::vector<std::int64_t> ids;
    for (int i = 0; i < count; ++i) ids.push_back(kind.sharing ? *rc::gen::inRange(0, 20) * 2 + i : at * 2 + i);
    give_parameters(node, ids);
    if (node.callable) give_costs(node);
    if (kind.sharing && *rc::gen::inRange(0, 20) == 0) node.together.push_back(*rc::gen::inRange(0, at));
    tree.push_back(node);
  }
  return tree;
}

// A root without work of its own, and under it leaves with parameters.
inline ModuleTree any_chain_of_leaves(int most) {
  ModuleTree tree(1);
  const int size = *rc::gen::inRange(1, most + 1).as("leaves");
  for (int at = 1; at <= size; ++at) {
    Node node;
    node.parent = 0;
    node.name = std::to_string(at);
    node.parameter_ids = {at};
    node.parameter_bytes = *rc::gen::inRange(1, 1000);
    give_costs(node);
    tree.push_back(node);
  }
  return tree;
}

inline Link any_link() {
  return *rc::gen::arbitrary<bool>().as("messages take time")
             ? Link{static_cast<double>(*rc::gen::inRange(0, 50)), static_cast<double>(*rc::gen::inRange(1, 20))}
             : Link{};
}

inline Goal any_goal() {
  Goal goal;
  goal.partitions = *rc::gen::inRange(1, 9).as("partitions");
  goal.microbatches = *rc::gen::inRange(1, 17).as("microbatches");
  if (*rc::gen::arbitrary<bool>()) goal.schedule = "simple";
  if (*rc::gen::inRange(0, 4) == 0) goal.active_microbatches = *rc::gen::inRange(1, 10).as("active microbatches");
  goal.memory_weight = *rc::gen::element(0.0, 0.2, 0.8, 1.0).as("memory weight");
  goal.link = any_link();
  return goal;
}

}  // namespace lamina::plan
