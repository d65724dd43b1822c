// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/candidate.h"

#include <algorithm>
#include <cmath>

namespace lamina::plan {
namespace {

constexpr double kRounding = 1e-9;

double ratio(double part, double whole) { return whole > 0 ? part / whole : 0; }

}  // namespace

bool Score::beats(const Score& other) const {
  if (overflow_bytes != other.overflow_bytes) return overflow_bytes < other.overflow_bytes;
  if (crossings != other.crossings) return crossings < other.crossings;
  if (std::abs(cost_excess - other.cost_excess) > kRounding) return cost_excess < other.cost_excess;
  if (std::abs(step_excess - other.step_excess) > kRounding) return step_excess < other.step_excess;
  if (std::abs(compute_excess - other.compute_excess) > kRounding) return compute_excess < other.compute_excess;
  return objective < other.objective * (1 - kRounding);
}

Candidate::Candidate(const Problem& problem)
    : problem_(&problem),
      owners_(problem.items.size(), kNobody),
      loads_(problem.goal.partitions),
      of_ranks_us_(problem.goal.partitions) {}

Candidate::Candidate(const Problem& problem, const std::vector<int>& owners) : Candidate(problem) {
  for (int item = 0; item < problem.items.size(); ++item) move(item, owners[item]);
}

int Candidate::rank_at(int point) const {
  const bool inside = point >= 0 && point < static_cast<int>(problem_->item_at.size());
  return inside ? owners_[problem_->item_at[point]] : 0;
}

bool Candidate::crosses(int boundary) const {
  const int before = rank_at(boundary - 1);
  const int after = rank_at(boundary);
  return before != after && before != kNobody && after != kNobody;
}

void Candidate::move(int item, int rank) {
  const auto count = [&](int sign) {
    for (int boundary : problem_->boundaries[item]) {
      if (!crosses(boundary)) continue;
      messages_ += sign;
      messages_us_ += sign * problem_->message_us[boundary];
      for (int rank : {rank_at(boundary - 1), rank_at(boundary)})
        of_ranks_us_[rank] += sign * problem_->of_ranks_us[boundary];
    }
    for (int neighbor : problem_->beside_in_chain[item]) {
      if (owners_[neighbor] != kNobody && owners_[neighbor] != owners_[item]) crossings_ += sign;
    }
  };
  if (owners_[item] != kNobody) {
    count(-1);
    loads_[owners_[item]] -= problem_->loads[item];
  }
  owners_[item] = rank;
  if (rank == kNobody) return;
  loads_[rank] += problem_->loads[item];
  count(1);
}

StepShape Candidate::shape() const {
  StepShape shape = shape_of_work();
  shape.path_forward_us += messages_us_;
  shape.path_backward_us += messages_us_;
  for (std::size_t rank = 0; rank < loads_.size(); ++rank) {
    const double each = of_ranks_us_[rank];
    shape.heaviest_forward_us = std::max(shape.heaviest_forward_us, loads_[rank].forward_us + each);
    shape.heaviest_backward_us = std::max(shape.heaviest_backward_us, loads_[rank].backward_us + each);
    shape.heaviest_us = std::max(shape.heaviest_us, loads_[rank].time_us() + 2 * each);
  }
  return shape;
}

StepShape Candidate::shape_of_work() const {
  StepShape shape;
  shape.path_forward_us = problem_->total.forward_us;
  shape.path_backward_us = problem_->total.backward_us;
  const auto ranks = static_cast<double>(loads_.size());
  shape.heaviest_forward_us = problem_->total.forward_us / ranks;
  shape.heaviest_backward_us = problem_->total.backward_us / ranks;
  shape.heaviest_us = shape.heaviest_forward_us + shape.heaviest_backward_us;
  for (const Load& load : loads_) {
    shape.heaviest_forward_us = std::max(shape.heaviest_forward_us, load.forward_us);
    shape.heaviest_backward_us = std::max(shape.heaviest_backward_us, load.backward_us);
    shape.heaviest_us = std::max(shape.heaviest_us, load.time_us());
  }
  return shape;
}

Score Candidate::score(const Bounds& bounds, double step) const {
  const Goal& goal = problem_->goal;
  std::int64_t fullest = problem_->total.memory_bytes / static_cast<std::int64_t>(loads_.size());
  double heaviest_cost = problem_->total.cost / static_cast<double>(loads_.size());
  Score score;
  for (const Load& load : loads_) {
    heaviest_cost = std::max(heaviest_cost, load.cost);
    fullest = std::max(fullest, load.memory_bytes);
    const std::int64_t limit = goal.memory_limit_bytes.value_or(load.memory_bytes);
    score.overflow_bytes += std::max<std::int64_t>(0, load.memory_bytes - limit);
  }
  const int crossings = bounds.crossings.value_or(goal.partitions - 1);
  score.crossings = std::max(0, crossings_ - crossings);
  score.cost_excess = std::max(0.0, heaviest_cost / bounds.heaviest_cost - 1);
  score.step_excess = std::max(0.0, step / bounds.step_us - 1);
  score.compute_excess = std::max(0.0, compute_us() / bounds.compute_us - 1);
  const double serial = goal.microbatches * problem_->total.time_us();
  const double w = goal.memory_weight;
  score.objective = w * ratio(static_cast<double>(fullest), static_cast<double>(problem_->total.memory_bytes)) +
                    (1 - w) * ratio(step, serial);
  score.objective *= 1 + goal.message_price * std::max(0, messages_ - crossings - 1);
  return score;
}

}  // namespace lamina::plan
