// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/prediction.h"

#include <algorithm>

#include "lamina/plan/sharing.h"

namespace lamina::plan {

double step_us(const StepShape& shape, const Goal& goal) {
  const double later = goal.microbatches - 1;
  const double path = shape.path_forward_us + shape.path_backward_us;
  const int window = std::max(goal.window(), 1);
  if (goal.schedule == "simple") {
    return path +
           later * (std::max(shape.heaviest_forward_us, shape.path_forward_us / window) + shape.heaviest_backward_us);
  }
  return path + later * std::max(shape.heaviest_us, path / window);
}

Prediction predict(const Route& route, const Assignment& owners, const Goal& goal) {
  Prediction result{std::vector<RankLoad>(goal.partitions), {}};
  StepShape& shape = result.shape;
  std::size_t at = 0;  // the leading rank
  std::int64_t value_bytes = 0;
  const auto go_to = [&](std::size_t rank) {
    if (rank == at) return;
    shape.path_forward_us += goal.link.time_us(value_bytes);
    shape.path_backward_us += goal.link.time_us(value_bytes);
    result.ranks[at].out_bytes += value_bytes;
    at = rank;
  };
  for (const Point& point : route.points) {
    const auto rank = static_cast<std::size_t>(owners[point.node].value);
    go_to(rank);
    result.ranks[rank].forward_us += point.forward_us;
    result.ranks[rank].backward_us += point.backward_us;
    shape.path_forward_us += point.forward_us;
    shape.path_backward_us += point.backward_us;
    value_bytes = point.value_bytes;
  }
  go_to(0);
  for (const RankLoad& rank : result.ranks) {
    shape.heaviest_forward_us = std::max(shape.heaviest_forward_us, rank.forward_us);
    shape.heaviest_backward_us = std::max(shape.heaviest_backward_us, rank.backward_us);
    shape.heaviest_us = std::max(shape.heaviest_us, rank.forward_us + rank.backward_us);
  }
  return result;
}

std::vector<std::int64_t> memory_bytes(const ModuleTree& tree, const Assignment& owners, const Goal& goal) {
  const Sharing sharing = find_sharing(tree);
  std::vector<std::int64_t> memory(goal.partitions);
  for (std::size_t node = 0; node < tree.size(); ++node) {
    memory[owners[node].value] += 2 * sharing.bytes[node] + goal.held() * tree[node].activation_bytes;
  }
  return memory;
}

}  // namespace lamina::plan
