// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/draft.h"

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

Draft::Draft(const Task& task)
    : task_(&task),
      owners_(task.items.size(), kNobody),
      loads_(task.goal.partitions),
      before_us_(task.goal.partitions),
      of_ranks_us_(task.goal.partitions),
      unowned_(task.items.size()) {}

Draft::Draft(const Task& task, const std::vector<int>& owners) : Draft(task) {
  for (int item = 0; item < task.items.size(); ++item) move(item, owners[item]);
}

int Draft::rank_at(int point) const {
  const bool inside = point >= 0 && point < static_cast<int>(task_->item_at.size());
  return inside ? owners_[task_->item_at[point]] : 0;
}

bool Draft::crosses(int gap) const {
  const int before = rank_at(gap - 1);
  const int after = rank_at(gap);
  return before != after && before != kNobody && after != kNobody;
}

void Draft::move(int item, int rank) {
  const auto count = [&](int sign) {
    for (int gap : task_->gaps[item]) {
      if (!crosses(gap)) continue;
      messages_ += sign;
      if (gap > 0 && gap < task_->chain_end) crossings_ += sign;
      messages_us_ += sign * task_->message_us[gap];
      for (int rank : {rank_at(gap - 1), rank_at(gap)}) of_ranks_us_[rank] += sign * task_->of_ranks_us[gap];
    }
  };
  const auto locate = [&](int rank) {
    before_us_[rank] = before(loads_[rank].time_us(), loads_[rank].moment, task_->total.time_us());
  };
  if (const int owner = owners_[item]; owner != kNobody) {
    count(-1);
    loads_[owner] -= task_->weights[item];
    locate(owner);
    ++unowned_;
  }
  owners_[item] = rank;
  if (rank == kNobody) return;
  --unowned_;
  loads_[rank] += task_->weights[item];
  locate(rank);
  count(1);
}

// Where a microbatch comes first may be earlier while somebody owns nothing.
RankTime Draft::time_of(int rank) const {
  return {loads_[rank].forward_us, loads_[rank].backward_us, unowned_ > 0 ? 0 : before_us_[rank]};
}

// None is shorter than that of ranks which are alike: of all ranks, the longest is no shorter than their mean.
Draft::Steps Draft::steps() const {
  const Weight& total = task_->total;
  StepTime compute(task_->goal, total.forward_us, total.backward_us, 0);
  StepTime step(task_->goal, total.forward_us, total.backward_us, messages_us_);
  for (int rank = 0; rank < task_->goal.partitions; ++rank) {
    RankTime time = time_of(rank);
    compute.add(time);
    time.forward_us += of_ranks_us_[rank];
    time.backward_us += of_ranks_us_[rank];
    step.add(time);
  }
  const auto ranks = static_cast<double>(loads_.size());
  const RankTime mean{total.forward_us / ranks, total.backward_us / ranks, total.time_us() * (ranks - 1) / (2 * ranks)};
  compute.add(mean);
  step.add(mean);
  return {step.us(), compute.us()};
}

int Draft::slowest() const {
  const StepTime step(task_->goal, task_->total.forward_us, task_->total.backward_us, 0);
  int slowest = 0;
  for (int rank = 1; rank < task_->goal.partitions; ++rank) {
    if (step.of(time_of(rank)) > step.of(time_of(slowest))) slowest = rank;
  }
  return slowest;
}

Score Draft::score(const Bounds& bounds) const {
  const Goal& goal = task_->goal;
  const auto [step, compute] = steps();
  std::int64_t fullest = task_->total.memory_bytes / static_cast<std::int64_t>(loads_.size());
  double heaviest_cost = task_->total.cost / static_cast<double>(loads_.size());
  Score score;
  for (const Weight& load : loads_) {
    heaviest_cost = std::max(heaviest_cost, load.cost);
    fullest = std::max(fullest, load.memory_bytes);
    const std::int64_t limit = goal.memory_limit_bytes.value_or(load.memory_bytes);
    score.overflow_bytes += std::max<std::int64_t>(0, load.memory_bytes - limit);
  }
  score.crossings = std::max(0, crossings_ - goal.partitions + 1);
  score.cost_excess = std::max(0.0, heaviest_cost / bounds.heaviest_cost - 1);
  score.step_excess = std::max(0.0, step / bounds.step_us - 1);
  score.compute_excess = std::max(0.0, compute / bounds.compute_us - 1);
  const double serial = goal.microbatches * task_->total.time_us();
  const double w = goal.memory_weight;
  score.objective = w * ratio(static_cast<double>(fullest), static_cast<double>(task_->total.memory_bytes)) +
                    (1 - w) * ratio(step, serial);
  score.objective *= 1 + goal.message_price * std::max(0, messages_ - goal.partitions);
  return score;
}

}  // namespace lamina::plan
