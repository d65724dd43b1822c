// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

#include "lamina/plan/search.h"

namespace lamina::plan {

// Scores candidates by the schedule itself, as long as there are turns left to simulate: after them nothing is better.
// A candidate is spared its simulation where a lower bound of its step is long enough.
class SimulatedSteps {
 public:
  // The score of a candidate with such a step. A longer one is no better.
  using Judge = std::function<Score(const Candidate&, double step_us)>;

  explicit SimulatedSteps(const Problem& problem) : problem_(problem) {}

  // From now on.
  void allow(std::int64_t turns) { left_ = turns; }

  double mean_us(const Candidate& candidate) const;
  Scoring scoring(Judge judge);
  Scoring scoring(const Bounds& bounds);

 private:
  Score score(const Candidate& candidate, const Score& to_beat, const Judge& judge);
  PlannedWork work_of(const Candidate& candidate) const;

  const Problem& problem_;
  std::int64_t left_ = 0;
};

}  // namespace lamina::plan
