// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "lamina/plan/check_memory.h"
#include "lamina/plan/planner.h"
#include "lamina/plan/search.h"
#include "lamina/plan/simulated_steps.h"
#include "lamina/plan/tree_division.h"
#include "lamina/plan/weighted_cost.h"

namespace lamina::plan {
namespace {

// How many candidates are looked at for one number of partitions, times that number.
constexpr int kLocalCandidates = 40'000;
constexpr int kExactCandidates = 200'000;
constexpr std::int64_t kSimulatedTurns = 3'000'000;     // of the schedule, where moves are tried: about a second
constexpr std::int64_t kAllSimulatedTurns = 5'000'000;  // where all plans are
constexpr double kSlower = 1.05;                        // times the best cut's step is the longest that memory is worth
constexpr double kCutGains = 1.01;     // what is simulated replaces what is predicted where it is shorter by so much
constexpr double kFoldGains = 1.03;    // a V is worth its messages where anything else takes so much longer
constexpr double kUneven = 1.05;       // times the best cut's cost is the most that a rank of a chain has
constexpr int kBaseline = 3;           // the place of the published plan among the starts
constexpr int kSpare = 64;             // so many partitions more than there are items, nothing better is found
constexpr std::size_t kFewItems = 24;  // of more, so many candidates are too small a part

// [Note: monotonic] A plan for k partitions is the best of what can be found for k, and of the plan for k - 1: so more
// partitions never make the predicted step longer. That holds because what is found for k does not depend on the number
// of partitions wanted in the end. The plan for those is then chosen by the simulated schedule.
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
    const Scoring as_predicted = predicted(baseline, starts.front());
    std::vector<Candidate> found{{problem_, owners_}};
    for (const std::vector<int>& start : starts) {
      found.emplace_back(problem_, start);
      improve(found.emplace_back(problem_, start), problem_, as_predicted, kLocalCandidates / partitions);
    }
    Candidate best = best_of(found, as_predicted);
    const bool contiguous = !problem_.chain.empty() && best.score({}).overflow_bytes == 0;
    if (contiguous) {
      improve_cuts(found.emplace_back(problem_, starts.front()), problem_, as_predicted, kLocalCandidates / partitions);
      best = best_of(found, as_predicted);
    } else if (problem_.movable.size() <= kFewItems) {
      branch_and_bound(best, problem_, as_predicted, kExactCandidates / partitions);
      found.push_back(best);
    }
    if (problem_.route.timed && partitions == wanted_) {
      if (!contiguous) {
        best = best_in_schedule(std::move(found), baseline, starts.front());
      } else if (problem_.goal.memory_weight < 1 && partitions > 1) {
        best = best_cut_in_schedule(best, starts);
      }
    }
    owners_ = best.owners();
  }

  static Candidate best_of(const std::vector<Candidate>& candidates, const Scoring& scoring) {
    const Candidate* best = nullptr;
    Score score = Score::none();
    for (const Candidate& candidate : candidates) {
      const Score own = scoring(candidate, score);
      if (best != nullptr && !own.beats(score)) continue;
      best = &candidate;
      score = own;
    }
    return *best;
  }

  // Uneven parts, and a V: each rank but the last has a part on the way there and one on the way back.
  Candidate best_cut_in_schedule(const Candidate& predicted, const std::vector<std::vector<int>>& starts) const {
    SimulatedSteps steps(problem_);
    Bounds bounds = bounds_of([&](const Candidate& candidate) { return steps.mean_us(candidate); }, starts[kBaseline]);
    std::vector<Candidate> found{predicted};
    for (const std::vector<int>& start : starts) found.emplace_back(problem_, start);
    Candidate best = predicted;
    const auto gains = [&](const Candidate& other, const Scoring& of_other, const Scoring& of_best, double part) {
      steps.allow(kSimulatedTurns);
      Score worth = of_best(best, Score::none());
      worth.objective /= part;
      return of_other(other, worth).beats(worth);
    };
    const std::int64_t each = kSimulatedTurns / static_cast<std::int64_t>(found.size() + 1);
    const Scoring of_cuts = steps.scoring(bounds);
    if (few_cuts()) {
      steps.allow(std::numeric_limits<std::int64_t>::max());
      try_all_cuts(found.front(), problem_, of_cuts);
    } else {
      for (Candidate& candidate : found) {
        steps.allow(each);
        shift_cuts(candidate, problem_, of_cuts);
      }
    }
    steps.allow(kSimulatedTurns);
    if (const Candidate cut = best_of(found, of_cuts); gains(cut, of_cuts, of_cuts, kCutGains)) best = cut;
    bounds.crossings = 2 * (problem_.goal.partitions - 1);
    const Scoring of_folds = steps.scoring(bounds);
    std::vector<Candidate> folds;
    for (int ranks = 2; ranks <= problem_.goal.partitions; ++ranks) folds.emplace_back(problem_, folded(ranks));
    steps.allow(each);
    Candidate fold = best_of(folds, of_folds);
    shift_cuts(fold, problem_, of_folds);
    const bool is_worth_it = kFoldGains * with_messages_us(fold) <= with_messages_us(best);
    return is_worth_it && gains(fold, of_folds, of_cuts, kFoldGains) ? fold : best;
  }

  // True where all cuts of the chain can be simulated.
  bool few_cuts() const {
    const auto places = static_cast<double>(problem_.chain.size());
    const auto turns = static_cast<double>(simulated_turns(problem_.goal.partitions, problem_.goal));
    double cuts = 1, all = 1;
    for (int cut = 1; cut < problem_.goal.partitions && cut <= places; ++cut) {
      cuts *= (places - cut + 1) / cut;
      all += cuts;
    }
    if (!problem_.leader) all *= places;  // those whose last items are the root's rank's
    return all * turns <= kAllSimulatedTurns;
  }

  double with_messages_us(const Candidate& candidate) const {
    Goal goal = problem_.goal;
    if (goal.link.free()) goal.link = goal.nominal;
    return mean_step_us(work_of(problem_.route, problem_.nodes(candidate.owners()), goal), goal);
  }

  // A cut into twice as many parts, of which each of so many ranks has one from the front and one from the back.
  std::vector<int> folded(int ranks) const {
    std::vector<int> owners = split_route(problem_, 0, 2 * ranks);
    for (int& owner : owners) owner = std::min(owner, 2 * ranks - 1 - owner);
    return owners;
  }

  // A microbatch comes back to ranks that work for others: how long it waits there, only the schedule itself says.
  Candidate best_in_schedule(std::vector<Candidate> found, const std::vector<int>& baseline,
                             const std::vector<int>& most_even) const {
    SimulatedSteps steps(problem_);
    const auto mean_us = [&](const Candidate& candidate) { return steps.mean_us(candidate); };
    const double plans = std::pow(problem_.goal.partitions, problem_.movable.size());
    const double turns = static_cast<double>(simulated_turns(problem_.route.points.size() + 2, problem_.goal));
    const bool few = plans * turns <= kAllSimulatedTurns;
    const auto each = kSimulatedTurns / static_cast<std::int64_t>(found.size() + 2);
    Bounds bounds = bounds_of(mean_us, baseline);
    if (!problem_.by_hand) {
      Candidate& cut = found.emplace_back(problem_, split_route(problem_, 0));
      steps.allow(each);
      improve_cuts(cut, problem_, steps.scoring(of_step), kLocalCandidates);
      if (problem_.goal.memory_weight < 1) bounds.step_us = std::min(bounds.step_us, kSlower * steps.mean_us(cut));
      steps.allow(each);
      improve_cuts(found.emplace_back(problem_, most_even), problem_, steps.scoring(bounds), kLocalCandidates);
    }
    const Scoring in_schedule = steps.scoring(bounds);
    for (Candidate& candidate : found) {
      if (few) break;
      steps.allow(each);
      improve(candidate, problem_, in_schedule, kLocalCandidates);
    }
    steps.allow(std::numeric_limits<std::int64_t>::max());
    Candidate best = best_of(found, in_schedule);
    if (few) try_all(best, problem_, in_schedule);
    return best;
  }

  // The score where the step alone counts, within the limit on memory.
  static Score of_step(const Candidate& candidate, double step_us) {
    Score score = candidate.score({}, 0);
    score.objective = step_us;
    return score;
  }

  // The assignments from which the search starts. Of equally good results the one of the earliest start is kept, so the
  // most even cut comes first, and contiguous ones come before others.
  std::vector<std::vector<int>> starts_of(const std::vector<int>& baseline) const {
    std::vector<std::vector<int>> result;
    for (double weight : {problem_.goal.memory_weight, 0.0, 1.0}) result.push_back(split_route(problem_, weight));
    result.push_back(baseline);  // at kBaseline
    result.push_back(owners_);
    return result;
  }

  // Bounds for a search by such steps: no slower than the baseline's, nor than with one partition less. Where memory
  // weighs, messages are left out of that last comparison: fewer bytes on each rank are worth them.
  Bounds bounds_of(const std::function<double(const Candidate&)>& step_us, const std::vector<int>& baseline) const {
    Bounds bounds;
    const Candidate other(problem_, baseline);
    const Score score = other.score({});
    if (score.overflow_bytes == 0 && score.crossings == 0) bounds.step_us = step_us(other);
    const Candidate before(problem_, owners_);
    if (!problem_.by_hand && before.score({}).overflow_bytes == 0) {
      if (problem_.goal.memory_weight > 0) {
        bounds.compute_us = before.compute_us();
      } else {
        bounds.step_us = std::min(bounds.step_us, step_us(before));
      }
    }
    return bounds;
  }

  // By the formula. Of a chain whose messages take no time, no rank is much heavier than in the most even cut.
  Scoring predicted(const std::vector<int>& baseline, const std::vector<int>& most_even) const {
    Bounds bounds = bounds_of(&Candidate::step_us, baseline);
    if (!problem_.chain.empty() && problem_.goal.link.free() && !problem_.goal.simple()) {
      const Candidate even(problem_, most_even);
      bounds.heaviest_cost = kUneven * std::ranges::max(even.loads(), {}, &Load::cost).cost;
    }
    return [bounds](const Candidate& candidate, const Score&) { return candidate.score(bounds); };
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
