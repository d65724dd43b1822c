// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/task.h"

#include <algorithm>

#include "lamina/plan/prediction.h"
#include "lamina/plan/sharing.h"

namespace lamina::plan {

Weight& Weight::operator+=(const Weight& other) {
  forward_us += other.forward_us;
  backward_us += other.backward_us;
  memory_bytes += other.memory_bytes;
  cost += other.cost;
  return *this;
}

Weight& Weight::operator-=(const Weight& other) {
  forward_us -= other.forward_us;
  backward_us -= other.backward_us;
  memory_bytes -= other.memory_bytes;
  cost -= other.cost;
  return *this;
}

Task::Task(const ModuleTree& tree, const Goal& wanted)
    : goal(wanted),
      route(find_route(tree)),
      items(find_items(tree, route, wanted.partitions)),
      gaps(items.size()),
      weights(items.size()),
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
    const int gap = static_cast<int>(item_at.size());
    if (gaps[item].empty() && !items.placed[item]) movable.push_back(item);
    if (gaps[item].empty() || gaps[item].back() != gap) gaps[item].push_back(gap);
    gaps[item].push_back(gap + 1);
    item_at.push_back(item);
    message_us.push_back(goal.link.time_us(point.value_bytes));
    of_ranks_us.push_back(goal.link.rank_time_us(point.value_bytes));
    weights[item] += {point.forward_us, point.backward_us, 0};
  }
  for (int item = 0; item < items.size(); ++item) {
    const bool holds = parameter_bytes_[item] + activation_bytes_[item] > 0;
    passes_on_[item] = gaps[item].empty() && !holds && !items.placed[item];
    if (gaps[item].empty() && holds && !items.placed[item]) movable.push_back(item);
  }
  lead_with_first_module();
  chain_end = find_chain();
  set_partitions(goal.partitions);
}

int Task::find_chain() const {
  if (by_hand) return 0;
  std::vector<bool> met(items.size());
  int end = 0;
  for (int at = 0; at < static_cast<int>(item_at.size()); ++at) {
    const int item = item_at[at];
    if (items.placed[item] && item != leader) continue;
    const bool again = at > 0 && item == item_at[at - 1];
    if ((met[item] && !again) || (end > 0 && end != at)) return 0;
    met[item] = true;
    end = at + 1;
  }
  return end;
}

// Where the root only passes on, partitions are alike, and the first module may as well be in the first one.
void Task::lead_with_first_module() {
  if (by_hand || item_at.empty() || !gaps[0].empty() || parameter_bytes_[0] + activation_bytes_[0] > 0) return;
  leader = item_at[0];
  items.placed[item_at[0]] = base::Partition(0);
  std::erase(movable, item_at[0]);
}

void Task::set_partitions(int partitions) {
  goal.partitions = partitions;
  total = {};
  for (int item = 0; item < items.size(); ++item) {
    weights[item].memory_bytes = held_bytes(parameter_bytes_[item], activation_bytes_[item], goal.held());
    weights[item].cost = 0;
    total += weights[item];
  }
  for (Weight& weight : weights) total.cost += weight.cost = cost(weight, goal.memory_weight);
}

double Task::cost(const Weight& weight, double memory_weight) const {
  const auto part = [](double share, double whole) { return whole > 0 ? share / whole : 0; };
  return memory_weight * part(static_cast<double>(weight.memory_bytes), static_cast<double>(total.memory_bytes)) +
         (1 - memory_weight) * part(weight.time_us(), total.time_us());
}

Assignment Task::nodes(std::vector<int> owners) const {
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

std::vector<int> Task::on_one_rank() const {
  std::vector<int> owners(items.size());
  for (int item = 0; item < items.size(); ++item) {
    if (items.placed[item]) owners[item] = static_cast<int>(items.placed[item]->value);
  }
  return owners;
}

}  // namespace lamina::plan
