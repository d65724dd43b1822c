// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>

#include "lamina/plan/search.h"

namespace lamina::plan {
namespace {

constexpr std::size_t kLightest = 3;  // ranks that are tried as a target although nothing beside the item is there

class LocalSearch {
 public:
  LocalSearch(Candidate& candidate, const Problem& problem, const Scoring& scoring, int candidates)
      : candidate_(candidate),
        problem_(problem),
        scoring_(scoring),
        left_(candidates),
        score_(scoring(candidate, Score::none())) {}

  void run() {
    while (left_ > 0 && (move_one() || (swaps() && swap_two()))) {
    }
  }

 private:
  struct Change {
    int item = 0;
    int rank = 0;
  };

  // Swaps break a chain's contiguous parts: one is of use only where these do not fit into memory.
  bool swaps() const { return problem_.chain.empty() || score_.overflow_bytes > 0; }

  int owner(int item) const { return candidate_.owners()[item]; }

  // The ranks that hold all others up.
  std::vector<bool> critical() const {
    const auto& loads = candidate_.loads();
    std::vector<bool> is(loads.size());
    const auto mark = [&](auto weight) { is[std::ranges::max_element(loads, {}, weight) - loads.begin()] = true; };
    mark(&Load::time_us);
    if (problem_.goal.simple()) {
      mark(&Load::forward_us);
      mark(&Load::backward_us);
    }
    mark(&Load::memory_bytes);
    for (std::size_t rank = 0; rank < loads.size(); ++rank) {
      if (problem_.goal.memory_limit_bytes && loads[rank].memory_bytes > *problem_.goal.memory_limit_bytes)
        is[rank] = true;
    }
    return is;
  }

  // The ranks with least time, then those with least memory.
  std::vector<int> lightest() const {
    std::vector<int> ranks(candidate_.loads().size());
    std::iota(ranks.begin(), ranks.end(), 0);
    std::vector<int> chosen;
    const auto take = [&](auto weight) {
      std::ranges::stable_sort(ranks, {}, [&](int rank) { return std::invoke(weight, candidate_.loads()[rank]); });
      chosen.insert(chosen.end(), ranks.begin(), ranks.begin() + std::min(kLightest, ranks.size()));
    };
    take(&Load::time_us);
    if (problem_.goal.memory_weight > 0 || problem_.goal.memory_limit_bytes) take(&Load::memory_bytes);
    std::ranges::sort(chosen);
    chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
    return chosen;
  }

  // The ranks of what comes before and after an item, where they are not its own.
  std::vector<int> beside(int item) const {
    std::vector<int> ranks;
    for (int boundary : problem_.boundaries[item]) {
      for (int point : {boundary - 1, boundary}) {
        const int rank = candidate_.rank_at(point);
        if (rank != owner(item) && !std::ranges::count(ranks, rank)) ranks.push_back(rank);
      }
    }
    return ranks;
  }

  // True where the candidate is better so than the best change found so far; it stays as it was.
  bool better(const std::vector<Change>& changes, Score& best) {
    std::vector<Change> back;
    for (const Change& change : changes) {
      back.push_back({change.item, owner(change.item)});
      candidate_.move(change.item, change.rank);
    }
    const Score score = scoring_(candidate_, best);
    std::ranges::reverse(back);
    for (const Change& change : back) candidate_.move(change.item, change.rank);
    --left_;
    if (!score.beats(best)) return false;
    best = score;
    return true;
  }

  bool apply(const std::vector<Change>& changes, const Score& score) {
    for (const Change& change : changes) candidate_.move(change.item, change.rank);
    score_ = score;
    return !changes.empty();
  }

  bool move_one() {
    const std::vector<bool> hurts = critical();
    const std::vector<int> light = lightest();
    Score best = score_;
    std::vector<Change> chosen;
    for (int item : problem_.movable) {
      std::vector<int> targets = beside(item);
      if (hurts[owner(item)]) targets.insert(targets.end(), light.begin(), light.end());
      for (int rank : targets) {
        if (left_ <= 0) break;
        if (rank != owner(item) && better({{item, rank}}, best)) chosen = {{item, rank}};
      }
    }
    return apply(chosen, best);
  }

  // Swaps between a critical rank and any other one; the first that helps.
  bool swap_two() {
    const std::vector<bool> hurts = critical();
    Score best = score_;
    for (int one : problem_.movable) {
      if (!hurts[owner(one)]) continue;
      for (int other : problem_.movable) {
        if (left_ <= 0) return false;
        if (owner(one) == owner(other)) continue;
        const std::vector<Change> swap{{one, owner(other)}, {other, owner(one)}};
        if (better(swap, best)) return apply(swap, best);
      }
    }
    return false;
  }

  Candidate& candidate_;
  const Problem& problem_;
  const Scoring& scoring_;
  int left_;
  Score score_;
};

}  // namespace

void improve(Candidate& candidate, const Problem& problem, const Scoring& scoring, int candidates) {
  LocalSearch(candidate, problem, scoring, candidates).run();
}

void improve_cuts(Candidate& candidate, const Problem& problem, const Scoring& scoring, int candidates) {
  Score score = scoring(candidate, Score::none());
  // Tries all cuts between the items of two partitions.
  const auto cut_better = [&](int first, int second) {
    std::vector<int> both;
    for (int item : problem.movable) {
      if (candidate.owners()[item] == first || candidate.owners()[item] == second) both.push_back(item);
    }
    Candidate trial = candidate;
    for (int item : both) trial.move(item, second);
    bool better = false;
    for (int item : both) {
      if (candidates-- <= 0) break;
      trial.move(item, first);
      const Score own = scoring(trial, score);
      if (!own.beats(score)) continue;
      candidate = trial;
      score = own;
      better = true;
    }
    return better;
  };
  for (bool better = true; better;) {
    better = false;
    for (int rank = 0; rank + 1 < problem.goal.partitions; ++rank) {
      better |= cut_better(rank, rank + 1);
      better |= cut_better(rank + 1, rank);
    }
  }
}

void shift_cuts(Candidate& candidate, const Problem& problem, const Scoring& scoring) {
  const auto& chain = problem.chain;
  const auto size = static_cast<int>(chain.size());
  const auto owner = [&](int place) { return candidate.owners()[chain[place]]; };
  Score score = scoring(candidate, Score::none());
  // Gives the items of one side of a cut to the other side, where all of them are one rank's.
  const auto shifted_better = [&](int from, int to, int rank) {
    if (from < 0 || to > size) return false;
    const int before = owner(from);
    for (int place = from; place < to; ++place) {
      if (owner(place) != before || problem.items.placed[chain[place]]) return false;
    }
    Candidate trial = candidate;
    for (int place = from; place < to; ++place) trial.move(chain[place], rank);
    const Score own = scoring(trial, score);
    if (!own.beats(score)) return false;
    candidate = std::move(trial);
    score = own;
    return true;
  };
  for (int by = std::max(size / (2 * problem.goal.partitions), 1); by > 0; by /= 2) {
    for (bool better = true; better;) {
      better = false;
      for (int cut = 1; cut < size; ++cut) {
        const int left = owner(cut - 1), right = owner(cut);
        if (left == right) continue;
        better |= shifted_better(cut, cut + by, left) || shifted_better(cut - by, cut, right);
      }
    }
  }
}

}  // namespace lamina::plan
