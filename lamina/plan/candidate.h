// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "lamina/plan/prediction.h"
#include "lamina/plan/problem.h"

namespace lamina::plan {

// Bounds that a plan must not exceed, beside the limit on memory.
struct Bounds {
  double step_us = std::numeric_limits<double>::infinity();
  double compute_us = std::numeric_limits<double>::infinity();     // the step with free messages
  double heaviest_cost = std::numeric_limits<double>::infinity();  // of a rank
  std::optional<int> crossings;                                    // of a chain; default: from each rank to the next
};

// How good a candidate is; the smaller the better, earlier members first.
struct Score {
  std::int64_t overflow_bytes = 0;  // above the limit, of all ranks
  int crossings = 0;                // of a chain more than it needs: see [Note: chain]
  double cost_excess = 0;           // over the bounds, as ratios
  double step_excess = 0;
  double compute_excess = 0;
  double objective = 0;  // memory and time as the goal weighs them; 1: one rank does all

  // The score of no candidate: any other is better.
  static Score none() { return {.overflow_bytes = std::numeric_limits<std::int64_t>::max()}; }

  // True where it is better by more than rounding makes up.
  bool beats(const Score& other) const;
};

// Owners of items while they are being chosen: moves cost little, and the score follows. kNobody owns nothing.
class Candidate {
 public:
  static constexpr int kNobody = -1;

  explicit Candidate(const Problem& problem);
  Candidate(const Problem& problem, const std::vector<int>& owners);

  const std::vector<int>& owners() const { return owners_; }
  const std::vector<Load>& loads() const { return loads_; }  // per rank

  void move(int item, int rank);
  // While somebody owns nothing it is a lower bound of every completion's.
  Score score(const Bounds& bounds) const { return score(bounds, step_us()); }
  Score score(const Bounds& bounds, double step_us) const;  // of such a step
  double step_us() const { return plan::step_us(shape(), problem_->goal); }
  double compute_us() const { return plan::step_us(shape_of_work(), problem_->goal); }  // the step with free messages
  int rank_at(int point) const;  // of the route; before the first and after the last it is the leading rank

 private:
  StepShape shape() const;
  StepShape shape_of_work() const;
  bool crosses(int boundary) const;

  const Problem* problem_;
  std::vector<int> owners_;
  std::vector<Load> loads_;
  std::vector<double> of_ranks_us_;  // per rank: what messages of a forward take of it
  double messages_us_ = 0;           // of a forward
  int messages_ = 0;
  int crossings_ = 0;  // within a chain
};

}  // namespace lamina::plan
