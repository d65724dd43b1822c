// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/bottleneck.h"

#include <algorithm>
#include <iomanip>

#include "lamina/base/str.h"
#include "lamina/plan/items.h"
#include "lamina/plan/owned_names.h"
#include "lamina/plan/placement.h"

namespace lamina::plan {
namespace {

constexpr double kFarAbove = 1.5;  // times the mean

// The items that are owned together and take longest on a rank.
struct Heaviest {
  double time_us = 0;
  int node = 0;  // of its nodes the one that takes longest
  bool alone = true;
};

Heaviest heaviest_on(std::size_t rank, const Assignment& owners, const Items& items, const Route& route) {
  std::vector<double> of_item(items.size());
  std::vector<double> of_node(owners.size());
  for (const Point& point : route.points) {
    if (static_cast<std::size_t>(owners[point.node].value) != rank) continue;
    of_item[items.of[point.node]] += point.forward_us + point.backward_us;
    of_node[point.node] += point.forward_us + point.backward_us;
  }
  const auto item = std::ranges::max_element(of_item) - of_item.begin();
  Heaviest result{of_item[item], items.first[item]};
  for (std::size_t node = 0; node < of_node.size(); ++node) {
    if (items.of[node] != item) continue;
    if (of_node[node] > of_node[result.node]) result.node = static_cast<int>(node);
    if (of_node[node] > 0 && of_node[node] < result.time_us) result.alone = false;
  }
  return result;
}

std::string times(double ratio) { return base::str(std::fixed, std::setprecision(1), ratio, " times the mean"); }

}  // namespace

std::string warn_of_bottleneck(const ModuleTree& tree, const Assignment& owners, const Route& route,
                               const Prediction& prediction) {
  double total = 0;
  for (const RankLoad& load : prediction.ranks) total += load.forward_us + load.backward_us;
  const double mean = total / static_cast<double>(prediction.ranks.size());
  const auto time_us = [](const RankLoad& load) { return load.forward_us + load.backward_us; };
  const auto rank = std::ranges::max_element(prediction.ranks, {}, time_us) - prediction.ranks.begin();
  const double most = time_us(prediction.ranks[rank]);
  if (most <= kFarAbove * mean) return "";
  const Items items = find_items(tree, route, static_cast<int>(prediction.ranks.size()));
  const Heaviest heaviest = heaviest_on(rank, owners, items, route);
  const std::string what = base::str("partition ", rank, " takes ", times(most / mean), ": ");
  const bool by_hand = std::ranges::any_of(tree, [](const Node& node) { return node.placed_at.has_value(); });
  if (heaviest.time_us > mean) {
    return base::str(what, shown(tree[heaviest.node]), heaviest.alone ? "" : ", with what has to be owned with it,",
                     " takes ", times(heaviest.time_us / mean),
                     " and cannot be cut; use fewer partitions, or make several modules of it");
  }
  if (by_hand) return base::str(what, "see to what is placed there by hand");
  return base::str(what, "no module alone, but memory, is to blame; a smaller memory_weight makes times more even");
}

}  // namespace lamina::plan
