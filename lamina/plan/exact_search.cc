// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "lamina/plan/search.h"

namespace lamina::plan {
namespace {

// Branch and bound, the items in the order of the route.
class ExactSearch {
 public:
  ExactSearch(Candidate& best, const Problem& problem, const Bounds& bounds, int candidates)
      : best_(best),
        problem_(problem),
        bounds_(bounds),
        left_(candidates),
        score_(best.score(bounds)),
        candidate_(problem) {
    std::vector<bool> moves(problem.items.size());
    for (int item : problem.movable) moves[item] = true;
    for (int item = 0; item < problem.items.size(); ++item) {
      if (!moves[item]) candidate_.move(item, best.owners()[item]);
    }
  }

  void run() { decide(0, 1); }

 private:
  // Partitions without anything placed by hand are alike: of those that are still empty, one is tried.
  void decide(std::size_t at, int used) {
    if (at == problem_.movable.size()) {
      best_ = candidate_;
      score_ = candidate_.score(bounds_);
      return;
    }
    const int item = problem_.movable[at];
    const int ranks = problem_.by_hand ? problem_.goal.partitions : std::min(problem_.goal.partitions, used + 1);
    for (int rank = 0; rank < ranks && left_ > 0; ++rank, --left_) {
      candidate_.move(item, rank);
      if (candidate_.score(bounds_).beats(score_)) decide(at + 1, std::max(used, rank + 1));
    }
    candidate_.move(item, Candidate::kNobody);
  }

  Candidate& best_;
  const Problem& problem_;
  const Bounds& bounds_;
  int left_;
  Score score_;
  Candidate candidate_;
};

}  // namespace

void search_all(Candidate& best, const Problem& problem, const Bounds& bounds, int candidates) {
  ExactSearch(best, problem, bounds, candidates).run();
}

}  // namespace lamina::plan
