// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "lamina/plan/search.h"

namespace lamina::plan {
namespace {

// Branch and bound, the items in the order of the route.
class ExactSearch {
 public:
  ExactSearch(Draft& best, const Task& task, const Bounds& bounds, int drafts)
      : best_(best), task_(task), bounds_(bounds), left_(drafts), score_(best.score(bounds)), draft_(task) {
    std::vector<bool> moves(task.items.size());
    for (int item : task.movable) moves[item] = true;
    for (int item = 0; item < task.items.size(); ++item) {
      if (!moves[item]) draft_.move(item, best.owners()[item]);
    }
  }

  void run() { decide(0, 1); }

 private:
  // Partitions without anything placed by hand are alike: of those that are still empty, one is tried.
  void decide(std::size_t at, int used) {
    if (at == task_.movable.size()) {
      best_ = draft_;
      score_ = draft_.score(bounds_);
      return;
    }
    const int item = task_.movable[at];
    const int ranks = task_.by_hand ? task_.goal.partitions : std::min(task_.goal.partitions, used + 1);
    for (int rank = 0; rank < ranks && left_ > 0; ++rank, --left_) {
      draft_.move(item, rank);
      if (draft_.score(bounds_).beats(score_)) decide(at + 1, std::max(used, rank + 1));
    }
    draft_.move(item, Draft::kNobody);
  }

  Draft& best_;
  const Task& task_;
  const Bounds& bounds_;
  int left_;
  Score score_;
  Draft draft_;
};

}  // namespace

void search_all(Draft& best, const Task& task, const Bounds& bounds, int drafts) {
  ExactSearch(best, task, bounds, drafts).run();
}

}  // namespace lamina::plan
