// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/simulated_steps.h"

#include <algorithm>
#include <utility>

namespace lamina::plan {
namespace {

constexpr double kCertain = 0.99;  // of a lower bound: a mean of draws is hardly ever below

}  // namespace

double SimulatedSteps::mean_us(const Candidate& candidate) const {
  return mean_step_us(work_of(candidate), problem_.goal);
}

Scoring SimulatedSteps::scoring(Judge judge) {
  return [this, judge = std::move(judge)](const Candidate& candidate, const Score& to_beat) {
    return score(candidate, to_beat, judge);
  };
}

Scoring SimulatedSteps::scoring(const Bounds& bounds) {
  return scoring([bounds](const Candidate& candidate, double step_us) { return candidate.score(bounds, step_us); });
}

Score SimulatedSteps::score(const Candidate& candidate, const Score& to_beat, const Judge& judge) {
  const double heaviest_us = std::ranges::max(candidate.loads(), {}, &Load::time_us).time_us();
  Score least = judge(candidate, kCertain * problem_.goal.microbatches * heaviest_us);
  if (!least.beats(to_beat)) return least;
  if (left_ <= 0) return Score::none();
  const PlannedWork work = work_of(candidate);
  left_ -= static_cast<std::int64_t>(problem_.route.points.size());  // a point of the work takes as long as a turn
  least = judge(candidate, kCertain * least_step_us(work, problem_.goal));
  if (!least.beats(to_beat)) return least;
  left_ -= simulated_turns(work.workload.pieces.size(), problem_.goal);
  return judge(candidate, mean_step_us(work, problem_.goal));
}

PlannedWork SimulatedSteps::work_of(const Candidate& candidate) const {
  return plan::work_of(problem_.route, problem_.nodes(candidate.owners()), problem_.goal);
}

}  // namespace lamina::plan
