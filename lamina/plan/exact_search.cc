// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>

#include "lamina/plan/search.h"

namespace lamina::plan {
namespace {

// Branch and bound, the items in the order of the route.
class ExactSearch {
 public:
  ExactSearch(Candidate& best, const Problem& problem, const Scoring& scoring, int candidates)
      : best_(best),
        problem_(problem),
        scoring_(scoring),
        left_(candidates),
        score_(scoring(best, Score::none())),
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
      score_ = scoring_(candidate_, Score::none());
      return;
    }
    const int item = problem_.movable[at];
    const int ranks = problem_.by_hand ? problem_.goal.partitions : std::min(problem_.goal.partitions, used + 1);
    for (int rank = 0; rank < ranks && left_ > 0; ++rank, --left_) {
      candidate_.move(item, rank);
      if (scoring_(candidate_, score_).beats(score_)) decide(at + 1, std::max(used, rank + 1));
    }
    candidate_.move(item, Candidate::kNobody);
  }

  Candidate& best_;
  const Problem& problem_;
  const Scoring& scoring_;
  int left_;
  Score score_;
  Candidate candidate_;
};

}  // namespace

void branch_and_bound(Candidate& best, const Problem& problem, const Scoring& scoring, int candidates) {
  ExactSearch(best, problem, scoring, candidates).run();
}

void try_all_cuts(Candidate& best, const Problem& problem, const Scoring& scoring) {
  const auto& chain = problem.chain;
  const auto size = static_cast<int>(chain.size());
  Score score = scoring(best, Score::none());
  Candidate candidate = best;
  const auto consider = [&] {
    const Score own = scoring(candidate, score);
    if (!own.beats(score)) return;
    best = candidate;
    score = own;
  };
  const auto give = [&](int begin, int rank) {
    for (int place = begin; place < size; ++place) candidate.move(chain[place], rank);
  };
  // From `begin` on all items are one partition's, or the later ones of those after it. The last ones may be where the
  // root's own work is, to which a microbatch comes back anyway.
  const std::function<void(int, int)> cut = [&](int begin, int rank) {
    give(begin, rank);
    consider();
    if (rank > 0 && !problem.leader) {
      for (int place = size - 1; place > begin; --place) {
        candidate.move(chain[place], 0);
        consider();
      }
      give(begin, rank);
    }
    if (rank + 1 == problem.goal.partitions) return;
    const bool has_others = rank == 0 && !problem.leader;  // the root's own work
    for (int end = size - 1; end >= (has_others ? begin : begin + 1); --end) cut(end, rank + 1);
  };
  cut(0, 0);
}

void try_all(Candidate& best, const Problem& problem, const Scoring& scoring) {
  Candidate candidate = best;
  for (int item : problem.movable) candidate.move(item, 0);
  Score score = scoring(best, Score::none());
  const auto last = problem.movable.end();
  for (auto item = problem.movable.begin(); item != last;) {
    if (const Score own = scoring(candidate, score); own.beats(score)) {
      best = candidate;
      score = own;
    }
    const auto is_last = [&](int each) { return candidate.owners()[each] + 1 == problem.goal.partitions; };
    for (item = problem.movable.begin(); item != last && is_last(*item); ++item) candidate.move(*item, 0);
    if (item != last) candidate.move(*item, candidate.owners()[*item] + 1);
  }
}

}  // namespace lamina::plan
