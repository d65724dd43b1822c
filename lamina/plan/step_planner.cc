// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "lamina/plan/check_memory.h"
#include "lamina/plan/planner.h"
#include "lamina/plan/search.h"
#include "lamina/plan/tree_division.h"
#include "lamina/plan/weighted_cost.h"

namespace lamina::plan {
namespace {

// How many candidates are looked at for one number of partitions, times that number.
constexpr int kLocalCandidates = 40'000;
constexpr int kExactCandidates = 200'000;
constexpr std::int64_t kSimulatedTurns = 400'000;       // of the schedule, where moves are tried
constexpr std::int64_t kAllSimulatedTurns = 1'000'000;  // where all plans are: the best is worth more
constexpr double kSlower = 1.05;                        // times the best cut's step is the longest that memory is worth
constexpr double kUneven = 1.05;       // times the best cut's cost is the most that a rank of a chain has
constexpr int kSpare = 64;             // so many partitions more than there are items, nothing better is found
constexpr std::size_t kFewItems = 24;  // of more, so many candidates are too small a part

// [Note: monotonic] A plan for k partitions is the best of what can be found for k, and of the plan for k - 1: so more
// partitions never make the predicted step longer. That holds because what is found for k does not depend on the number
// of partitions wanted in the end. Of what is no chain, the plan for those is then chosen by the simulated schedule.
class StepPlan {
 public:
  StepPlan(const ModuleTree& tree, const Goal& goal)
      : tree_(tree), problem_(tree, goal), wanted_(goal.partitions), owners_(problem_.on_one_rank()) {}

  Assignment run() {
    const int useful = static_cast<int>(problem_.movable.size()) + kSpare;
    for (int partitions = problem_.by_hand ? wanted_ : 1; partitions <= wanted_; ++partitions) {
      const bool searched = problem_.by_hand || partitions <= useful;
      if (!searched) partitions = wanted_;
      problem_.set_partitions(partitions);
      // A plan over more ranks is no slower, but more microbatches are in flight, which take memory.
      if (searched || Candidate(problem_, owners_).score({}).overflow_bytes > 0) extend();
    }
    check_memory(tree_, problem_.nodes(owners_), problem_.goal);
    return problem_.nodes(owners_);
  }

 private:
  // From the plan for one partition less to the plan for problem_.goal.partitions.
  void extend() {
    const int partitions = problem_.goal.partitions;
    const std::vector<int> baseline = divide_tree(tree_, problem_);
    const std::vector<std::vector<int>> starts = starts_of(baseline);
    const Scoring as_predicted =
        scoring([](const Candidate& candidate) { return candidate.step_us(); }, baseline, starts.front());
    std::vector<Candidate> found{{problem_, owners_}};
    for (const std::vector<int>& start : starts) {
      found.emplace_back(problem_, start);
      improve(found.emplace_back(problem_, start), problem_, as_predicted, kLocalCandidates / partitions);
    }
    Candidate best = best_of(found, as_predicted);
    const bool contiguous = !problem_.chain.empty() && as_predicted(best).overflow_bytes == 0;
    if (contiguous) {
      improve_cuts(found.emplace_back(problem_, starts.front()), problem_, as_predicted, kLocalCandidates / partitions);
      best = best_of(found, as_predicted);
    } else if (problem_.movable.size() <= kFewItems) {
      branch_and_bound(best, problem_, as_predicted, kExactCandidates / partitions);
      found.push_back(best);
    }
    if (!contiguous && problem_.route.timed && partitions == wanted_)
      best = best_in_schedule(std::move(found), baseline, starts.front());
    owners_ = best.owners();
  }

  static Candidate best_of(const std::vector<Candidate>& candidates, const Scoring& scoring) {
    const Candidate* best = nullptr;
    Score score;
    for (const Candidate& candidate : candidates) {
      const Score own = scoring(candidate);
      if (best != nullptr && !own.beats(score)) continue;
      best = &candidate;
      score = own;
    }
    return *best;
  }

  // A microbatch comes back to ranks that work for others: how long it waits there, only the schedule itself says.
  Candidate best_in_schedule(std::vector<Candidate> found, const std::vector<int>& baseline,
                             const std::vector<int>& most_even) const {
    const auto simulated = [&](const Candidate& candidate) {
      return simulated_step_us(problem_.route, problem_.nodes(candidate.owners()), problem_.goal);
    };
    const std::int64_t turns = simulated_turns(problem_.route, problem_.goal);
    const double plans = std::pow(problem_.goal.partitions, problem_.movable.size());
    const bool few = plans * static_cast<double>(turns) <= kAllSimulatedTurns;
    const auto each = static_cast<int>(kSimulatedTurns / turns / static_cast<std::int64_t>(found.size() + 2));
    Scoring in_schedule = scoring(simulated, baseline, most_even);
    if (!problem_.by_hand) {
      Candidate& cut = found.emplace_back(problem_, split_route(problem_, 0));
      improve_cuts(cut, problem_, [&](const Candidate& candidate) { return of_step(candidate, simulated); }, each);
      if (problem_.goal.memory_weight < 1)
        in_schedule = scoring(simulated, baseline, most_even, kSlower * simulated(cut));
      improve_cuts(found.emplace_back(problem_, most_even), problem_, in_schedule, each);
    }
    for (Candidate& candidate : found) {
      if (!few && each > 0) improve(candidate, problem_, in_schedule, each);
    }
    Candidate best = best_of(found, in_schedule);
    if (few) try_all(best, problem_, in_schedule);
    return best;
  }

  // The score where the step alone counts, within the limit on memory.
  static Score of_step(const Candidate& candidate, const std::function<double(const Candidate&)>& step_us) {
    Score score = candidate.score({}, 0);
    score.objective = step_us(candidate);
    return score;
  }

  // The assignments from which the search starts. Of equally good results the one of the earliest start is kept, so the
  // most even cut comes first, and contiguous ones come before others.
  std::vector<std::vector<int>> starts_of(const std::vector<int>& baseline) const {
    std::vector<std::vector<int>> result;
    for (double weight : {problem_.goal.memory_weight, 0.0, 1.0}) result.push_back(split_route(problem_, weight));
    result.push_back(baseline);
    result.push_back(owners_);
    return result;
  }

  // Bounds for the search. Of a chain whose messages take no time, no rank is much heavier than in the most even cut.
  // The step is no slower than the baseline's, nor than with one partition less. Where memory weighs, messages are left
  // out of that last comparison: fewer bytes on each rank are worth them.
  Scoring scoring(const std::function<double(const Candidate&)>& step_us, const std::vector<int>& baseline,
                  const std::vector<int>& most_even,
                  double longest_us = std::numeric_limits<double>::infinity()) const {
    Bounds bounds;
    bounds.step_us = longest_us;
    const Candidate other(problem_, baseline);
    const Score score = other.score({});
    if (score.overflow_bytes == 0 && score.crossings == 0) bounds.step_us = std::min(longest_us, step_us(other));
    if (!problem_.chain.empty() && problem_.goal.link.free() && !problem_.goal.simple()) {
      const Candidate even(problem_, most_even);
      bounds.heaviest_cost = kUneven * std::ranges::max(even.loads(), {}, &Load::cost).cost;
    }
    const Candidate before(problem_, owners_);
    if (!problem_.by_hand && before.score({}).overflow_bytes == 0) {
      if (problem_.goal.memory_weight > 0) {
        bounds.compute_us = before.compute_us();
      } else {
        bounds.step_us = std::min(bounds.step_us, step_us(before));
      }
    }
    return [=](const Candidate& candidate) { return candidate.score(bounds, step_us(candidate)); };
  }

  const ModuleTree& tree_;
  Problem problem_;
  const int wanted_;  // partitions
  std::vector<int> owners_;
};

class StepPlanner : public Planner {
 public:
  Assignment assign(const ModuleTree& tree, const Goal& goal) const override {
    return tree.empty() ? Assignment{} : StepPlan(tree, goal).run();
  }
};

}  // namespace

std::unique_ptr<Planner> step_planner() { return std::make_unique<StepPlanner>(); }

}  // namespace lamina::plan
