// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lamina/plan/goal.h"
#include "lamina/plan/items.h"
#include "lamina/plan/module_tree.h"
#include "lamina/plan/route.h"

namespace lamina::plan {

// The cost of an item, or of a rank.
struct Load {
  double forward_us = 0;
  double backward_us = 0;
  std::int64_t memory_bytes = 0;
  double cost = 0;  // the part of the whole's memory and of its time, as the goal weighs them

  double time_us() const { return forward_us + backward_us; }
  Load& operator+=(const Load& other);
  Load& operator-=(const Load& other);
};

// [Note: chain] A chain is a route that meets each item that is to be placed once. It is cut into contiguous parts, so
// that between them it crosses at most once from each partition to the next: whatever else would be more even costs
// messages in every microbatch, forward and backward. What is placed already, such as the model's own operations
// between its modules, does not count.

// A tree and a goal as the planners see them: items instead of nodes, and what moving them changes.
struct Problem {
  Problem(const ModuleTree& tree, const Goal& goal);

  // This problem for another number of partitions.
  void set_partitions(int partitions);
  // The part of the whole's memory times `memory_weight`, and of its time times the rest.
  double cost(const Load& load, double memory_weight) const;
  // Owners of all nodes from those of the items that weigh something. A module that only passes on is where the first
  // module under it is, and partitions are numbered in the order of the route, where nothing was placed by hand.
  Assignment nodes(std::vector<int> owners) const;
  // Everything in partition 0, except what is placed elsewhere by hand.
  std::vector<int> on_one_rank() const;

  Goal goal;
  Route route;
  Items items;
  std::vector<int> item_at;                  // per point of the route
  std::vector<std::vector<int>> boundaries;  // per item: the boundaries beside its points; boundary i is before point i
  std::vector<double> message_us;            // per boundary
  std::vector<double> of_ranks_us;           // per boundary: what a message there takes of each of its ranks
  std::vector<Load> loads;                   // per item
  Load total;
  std::vector<int> movable;  // items that weigh something and are not placed by hand, in the order of the route
  bool by_hand = false;
  std::vector<int> chain;  // its items in their order, none where the route is no chain; see [Note: chain]
  std::vector<std::vector<int>> beside_in_chain;  // per item: those before and after it
  std::optional<int> leader;  // the first item of the route, where it leads in partition 0 although any other would do

 private:
  void lead_with_first_module();
  std::vector<int> find_chain() const;

  std::vector<int> parents_;                    // per node
  std::vector<bool> passes_on_;                 // per item: it weighs nothing
  std::vector<std::int64_t> parameter_bytes_;   // per item
  std::vector<std::int64_t> activation_bytes_;  // per item
};

}  // namespace lamina::plan
