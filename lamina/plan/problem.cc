// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/problem.h"

#include <algorithm>

#include "lamina/plan/prediction.h"
#include "lamina/plan/tied_parameters.h"

namespace lamina::plan {

Load& Load::operator+=(const Load& other) {
  forward_us += other.forward_us;
  backward_us += other.backward_us;
  memory_bytes += other.memory_bytes;
  cost += other.cost;
  return *this;
}

Load& Load::operator-=(const Load& other) {
  forward_us -= other.forward_us;
  backward_us -= other.backward_us;
  memory_bytes -= other.memory_bytes;
  cost -= other.cost;
  return *this;
}

Problem::Problem(const ModuleTree& tree, const Goal& wanted)
    : goal(wanted),
      route(find_route(tree)),
      items(find_items(tree, route, wanted.partitions)),
      boundaries(items.size()),
      loads(items.size()),
      beside_in_chain(items.size()),
      passes_on_(items.size()),
      parameter_bytes_(items.size()),
      activation_bytes_(items.size()) {
  const std::vector<std::int64_t> parameter_bytes = group_bytes(tree);
  for (std::size_t node = 0; node < tree.size(); ++node) {
    parents_.push_back(tree[node].parent);
    parameter_bytes_[items.of[node]] += parameter_bytes[node];
    activation_bytes_[items.of[node]] += tree[node].activation_bytes;
    by_hand |= tree[node].placed_at.has_value();
  }
  message_us.push_back(goal.link.time_us(0));
  of_ranks_us.push_back(goal.link.rank_time_us(0));
  for (const Point& point : route.points) {
    const int item = items.of[point.node];
    const int boundary = static_cast<int>(item_at.size());
    if (boundaries[item].empty() && !items.placed[item]) movable.push_back(item);
    if (boundaries[item].empty() || boundaries[item].back() != boundary) boundaries[item].push_back(boundary);
    boundaries[item].push_back(boundary + 1);
    item_at.push_back(item);
    message_us.push_back(goal.link.time_us(point.value_bytes));
    of_ranks_us.push_back(goal.link.rank_time_us(point.value_bytes));
    loads[item] += {point.forward_us, point.backward_us, 0};
  }
  for (int item = 0; item < items.size(); ++item) {
    const bool holds = parameter_bytes_[item] + activation_bytes_[item] > 0;
    passes_on_[item] = boundaries[item].empty() && !holds && !items.placed[item];
    if (boundaries[item].empty() && holds && !items.placed[item]) movable.push_back(item);
  }
  lead_with_first_module();
  chain = find_chain();
  for (std::size_t place = 1; place < chain.size(); ++place) {
    beside_in_chain[chain[place - 1]].push_back(chain[place]);
    beside_in_chain[chain[place]].push_back(chain[place - 1]);
  }
  set_partitions(goal.partitions);
}

std::vector<int> Problem::find_chain() const {
  std::vector<int> found;
  if (by_hand) return found;
  std::vector<bool> met(items.size());
  for (int item : item_at) {
    if ((items.placed[item] && item != leader) || (!found.empty() && found.back() == item)) continue;
    if (met[item]) return {};
    met[item] = true;
    found.push_back(item);
  }
  return found;
}

// Where the root only passes on, partitions are alike, and the first module may as well be in the first one.
void Problem::lead_with_first_module() {
  if (by_hand || item_at.empty() || !boundaries[0].empty() || parameter_bytes_[0] + activation_bytes_[0] > 0) return;
  leader = item_at[0];
  items.placed[item_at[0]] = base::Partition(0);
  std::erase(movable, item_at[0]);
}

void Problem::set_partitions(int partitions) {
  goal.partitions = partitions;
  total = {};
  for (int item = 0; item < items.size(); ++item) {
    loads[item].memory_bytes = held_bytes(parameter_bytes_[item], activation_bytes_[item], goal.held());
    loads[item].cost = 0;
    total += loads[item];
  }
  for (Load& load : loads) total.cost += load.cost = cost(load, goal.memory_weight);
}

double Problem::cost(const Load& load, double memory_weight) const {
  const auto part = [](double share, double whole) { return whole > 0 ? share / whole : 0; };
  return memory_weight * part(static_cast<double>(load.memory_bytes), static_cast<double>(total.memory_bytes)) +
         (1 - memory_weight) * part(load.time_us(), total.time_us());
}

Assignment Problem::nodes(std::vector<int> owners) const {
  if (!by_hand) {
    std::vector<int> number(goal.partitions, -1);
    int used = 0;
    const auto meet = [&](int rank) {
      if (number[rank] < 0) number[rank] = used++;
    };
    meet(0);
    for (int item : item_at) meet(owners[item]);
    for (int& owner : owners) {
      meet(owner);
      owner = number[owner];
    }
  }
  Assignment result = items.spread(owners);
  for (std::size_t node = result.size(); node-- > 1;) {
    // Children come after their parent, so the first of them is the last to write.
    if (passes_on_[items.of[parents_[node]]]) result[parents_[node]] = result[node];
  }
  for (std::size_t node = 0; node < result.size(); ++node) {
    if (passes_on_[items.of[node]]) result[node] = result[items.first[items.of[node]]];
  }
  return result;
}

std::vector<int> Problem::on_one_rank() const {
  std::vector<int> owners(items.size());
  for (int item = 0; item < items.size(); ++item) {
    if (items.placed[item]) owners[item] = static_cast<int>(items.placed[item]->value);
  }
  return owners;
}

}  // namespace lamina::plan
