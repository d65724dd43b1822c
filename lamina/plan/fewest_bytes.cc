// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/fewest_bytes.h"

#include <algorithm>
#include <cmath>
#include <compare>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <utility>

namespace lamina::plan {
namespace {

constexpr double kEven = 1.1;          // times its even share a rank may have
constexpr double kWhole = 1e9;         // the cost of all items, in units: squares fit into 64 bits
constexpr int kNobody = -1;            // owns an item whose rank is not chosen yet
constexpr std::size_t kFewItems = 16;  // of so many, all assignments are gone through, without those that cannot win
constexpr int kExactMoves = 1'000'000;
constexpr std::int64_t kLooks = 100'000;         // at moves of items, for each of them
constexpr std::int64_t kMostLooks = 40'000'000;  // half a second
constexpr int kPatience = 60;                    // moves after the best of a pass
constexpr std::size_t kMostShaken = 40;          // items
constexpr std::size_t kMostCuts = 4'000;         // places that are tried for cuts of the order
constexpr std::uint32_t kSeed = 1;

// Values and messages that go between ranks in a forward.
struct Sent {
  std::int64_t bytes = 0;
  std::int64_t messages = 0;

  auto operator<=>(const Sent&) const = default;
  Sent& operator+=(const Sent& other) {
    bytes += other.bytes;
    messages += other.messages;
    return *this;
  }
  Sent& operator-=(const Sent& other) {
    bytes -= other.bytes;
    messages -= other.messages;
    return *this;
  }
};

// How good an assignment is: the smaller the better, earlier members first. None shrinks where an item more is placed.
struct Score {
  std::int64_t overflow_bytes = 0;  // over the limit of memory, of all ranks
  std::int64_t excess = 0;          // over the limit of cost, of all ranks
  Sent sent;
  std::int64_t spread = 0;  // the sum of the squares of ranks' costs

  auto operator<=>(const Score&) const = default;
};

// An assignment while it is chosen, and what its values cost: moves take as long as the item's values have ranks.
class Division {
 public:
  Division(const Problem& problem, const Traffic& traffic)
      : ranks_(problem.goal.partitions), owners_(problem.items.size(), kNobody), used_(problem.items.size()) {
    for (const Load& load : problem.loads) {
      costs_.push_back(std::llround(load.cost * kWhole));
      bytes_.push_back(load.memory_bytes);
    }
    const double even = kWhole * problem.total.cost / problem.goal.partitions;
    const std::int64_t heaviest = std::ranges::max(costs_);
    // Rounded costs may be a unit more each.
    limit_ = std::max(static_cast<std::int64_t>(kEven * even), heaviest) + static_cast<std::int64_t>(costs_.size());
    most_bytes_ = problem.goal.memory_limit_bytes.value_or(std::numeric_limits<std::int64_t>::max());
    for (const ReadValue& value : traffic.all()) {
      const auto users = traffic.users(value);
      if (value.everywhere || users.size() < 2) continue;  // costs the same wherever they are
      for (const int user : users) used_[user].push_back(static_cast<int>(values_.size()));
      values_.push_back({{value.bytes, 1}, users, {}});
    }
  }

  const std::vector<int>& owners() const { return owners_; }
  const Score& score() const { return score_; }
  int ranks() const { return static_cast<int>(ranks_.size()); }
  std::int64_t cost(int item) const { return costs_[item]; }
  std::int64_t limit() const { return limit_; }
  const std::vector<int>& values_of(int item) const { return used_[item]; }
  Sent weight(int value) const { return values_[value].weight; }
  const std::vector<int>& users(int value) const { return values_[value].users; }
  std::size_t count() const { return values_.size(); }  // of values
  bool is_over(int rank) const { return ranks_[rank].cost > limit_ || ranks_[rank].bytes > most_bytes_; }
  bool any_over() const { return score_.overflow_bytes > 0 || score_.excess > 0; }

  void move(int item, int rank) {
    if (owners_[item] != kNobody) put(item, owners_[item], -1);
    owners_[item] = rank;
    if (rank != kNobody) put(item, rank, 1);
  }

  void move_all(const std::vector<int>& owners) {
    for (std::size_t item = 0; item < owners.size(); ++item) {
      if (owners_[item] != owners[item]) move(static_cast<int>(item), owners[item]);
    }
  }

  // True where it shares a value with another rank.
  bool is_at_a_border(int item) const {
    return std::ranges::any_of(used_[item], [&](int value) { return values_[value].at.size() > 1; });
  }

  // The lightest rank.
  int lightest() const { return static_cast<int>(std::ranges::min_element(ranks_, {}, &Rank::cost) - ranks_.begin()); }

  // A move of an item to a rank, and how it changes the score.
  struct Move {
    int item = 0;
    int rank = 0;
    Sent sent;
    std::int64_t spread = 0;

    bool beats(const Move& other) const { return std::pair(sent, spread) < std::pair(other.sent, other.spread); }
  };

  // Calls back with each move of the item that might help: to ranks of what it shares values with, and to `lightest`.
  template <typename Consider>
  void each_move(int item, int lightest, const Consider& consider) {
    const int from = owners_[item];
    Sent apart;  // the change where it goes to a rank with none of its values
    near_.clear();
    for (const int number : used_[item]) {
      const Shared& value = values_[number];
      apart += value.weight;
      for (const auto& [rank, users] : value.at) {
        if (rank == from) {
          if (users == 1) apart -= value.weight;
          continue;
        }
        const auto found = std::ranges::find(near_, rank, &std::pair<int, Sent>::first);
        auto& saved = found == near_.end() ? near_.emplace_back(rank, Sent{}) : *found;
        saved.second += value.weight;
      }
    }
    if (lightest != from && std::ranges::find(near_, lightest, &std::pair<int, Sent>::first) == near_.end())
      near_.emplace_back(lightest, Sent{});
    const auto square = [](std::int64_t cost) { return cost * cost; };
    for (const auto& [rank, saved] : near_) {
      const std::int64_t own = costs_[item], here = ranks_[from].cost, there = ranks_[rank].cost;
      Sent sent = apart;
      sent -= saved;
      consider(Move{item, rank, sent, square(here - own) - square(here) + square(there + own) - square(there)});
    }
  }

  // True where the rank may have the item, also if it then has so much above its limit of cost.
  bool takes(int rank, int item, std::int64_t slack) const {
    return ranks_[rank].cost + costs_[item] <= limit_ + slack && ranks_[rank].bytes + bytes_[item] <= most_bytes_;
  }
  // True where the item's rank is over its limits, and the other one has less with it.
  bool relieves(int item, int rank) const {
    return is_over(owners_[item]) && ranks_[rank].cost + costs_[item] < ranks_[owners_[item]].cost;
  }

 private:
  struct Shared {
    Sent weight;
    std::vector<int> users;               // items
    std::vector<std::pair<int, int>> at;  // rank, how many of them are there
  };
  struct Rank {
    std::int64_t cost = 0;
    std::int64_t bytes = 0;
  };

  void put(int item, int rank, int sign) {
    Rank& load = ranks_[rank];
    weigh(load, -1);
    load.cost += sign * costs_[item];
    load.bytes += sign * bytes_[item];
    weigh(load, 1);
    for (const int number : used_[item]) {
      Shared& value = values_[number];
      const auto found = std::ranges::find(value.at, rank, &std::pair<int, int>::first);
      if (sign > 0) {
        if (found != value.at.end()) {
          ++found->second;
        } else {
          if (!value.at.empty()) score_.sent += value.weight;
          value.at.emplace_back(rank, 1);
        }
      } else if (--found->second == 0) {
        value.at.erase(found);
        if (!value.at.empty()) score_.sent -= value.weight;
      }
    }
  }

  void weigh(const Rank& load, int sign) {
    score_.overflow_bytes += sign * std::max<std::int64_t>(0, load.bytes - most_bytes_);
    score_.excess += sign * std::max<std::int64_t>(0, load.cost - limit_);
    score_.spread += sign * load.cost * load.cost;
  }

  std::vector<Rank> ranks_;
  std::vector<int> owners_;
  std::vector<std::vector<int>> used_;       // per item: values
  std::vector<std::int64_t> costs_, bytes_;  // per item
  std::int64_t limit_ = 0, most_bytes_ = 0;
  std::vector<Shared> values_;
  std::vector<std::pair<int, Sent>> near_;  // of each_move
  Score score_;
};

class Search {
 public:
  Search(const Problem& problem, const Traffic& traffic)
      : problem_(problem), division_(problem, traffic), locked_(problem.items.size(), true) {
    division_.move_all(problem.on_one_rank());
    for (const int item : problem.movable) locked_[item] = false;
    best_ = division_;
  }

  std::vector<int> run() {
    if (problem_.movable.empty() || division_.ranks() == 1) return best_->owners();
    if (problem_.by_hand) improve(division_.owners());
    improve(contiguous());
    if (problem_.movable.size() <= kFewItems) {
      go_through_all();
    } else {
      const auto items = static_cast<std::int64_t>(problem_.movable.size());
      while (looks_ < std::min(kMostLooks, kLooks * items)) improve(shaken());
    }
    return led_by_first();
  }

 private:
  // From these owners, by passes as long as one helps.
  void improve(const std::vector<int>& owners) {
    division_.move_all(owners);
    std::int64_t slack = 0;
    for (int idle = 0; idle < 2;) {
      idle = pass(slack) ? 0 : idle + 1;
      slack = slack > 0 ? 0 : division_.limit() / 8;
    }
    if (division_.score() < best_->score()) best_ = division_;
  }

  // Moves items one by one, each once and those that help most first, though for a while that may hurt; then takes back
  // what came after the best assignment on the way. With a slack ranks may have more than the limit for a moment, so
  // that items change places. True where it has helped.
  bool pass(std::int64_t slack) {
    std::vector<std::pair<int, int>> moved;  // item, and where it was
    std::size_t kept = 0;
    Score best = division_.score();
    while (moved.size() - kept < kPatience) {
      const auto move = best_move(slack);
      if (!move) break;
      moved.emplace_back(move->item, division_.owners()[move->item]);
      locked_[move->item] = true;
      division_.move(move->item, move->rank);
      if (division_.score() < best) {
        best = division_.score();
        kept = moved.size();
      }
    }
    for (const auto& [item, rank] : moved) locked_[item] = false;
    while (moved.size() > kept) {
      division_.move(moved.back().first, moved.back().second);
      moved.pop_back();
    }
    return kept > 0;
  }

  std::optional<Division::Move> best_move(std::int64_t slack) {
    std::optional<Division::Move> best;
    const int lightest = division_.lightest();
    const bool over = division_.any_over();
    for (const int item : problem_.movable) {
      ++looks_;
      if (locked_[item]) continue;
      if (over ? !division_.is_over(division_.owners()[item]) : !division_.is_at_a_border(item)) continue;
      division_.each_move(item, lightest, [&](const Division::Move& move) {
        ++looks_;
        if (!division_.takes(move.rank, item, over ? 0 : slack) && !division_.relieves(item, move.rank)) return;
        if (!best || move.beats(*best)) best = move;
      });
    }
    return best;
  }

  // The best cut into contiguous parts in the order of the visits, by what each part costs: a value costs as many parts
  // as use it, but one.
  std::vector<int> contiguous() const {
    const std::vector<int>& order = problem_.movable;
    const std::size_t items = order.size();
    const std::vector<std::vector<std::size_t>> before = previous_users();
    struct Part {
      std::int64_t excess = std::numeric_limits<std::int64_t>::max();
      Sent sent;
      std::size_t begin = 0;
      auto key() const { return std::pair(excess, sent); }
    };
    const auto parts = std::min(static_cast<std::size_t>(division_.ranks()), items);
    const std::size_t step = 1 + items / kMostCuts;                                // between two places for cuts
    std::vector<std::vector<Part>> best(parts + 1, std::vector<Part>(items + 1));  // by parts, and where they end
    best[0][0].excess = 0;
    for (std::size_t begin = 0; begin < items; begin += step) {
      std::int64_t cost = 0;
      Sent sent;
      for (std::size_t end = begin + 1; end <= items; ++end) {
        const int item = order[end - 1];
        cost += division_.cost(item);
        if (cost > 2 * division_.limit() && end > begin + step) break;
        for (std::size_t i = 0; i < before[end - 1].size(); ++i) {
          if (before[end - 1][i] <= begin) sent += division_.weight(division_.values_of(item)[i]);
        }
        if (end % step != 0 && end != items) continue;
        const std::int64_t excess = std::max<std::int64_t>(0, cost - division_.limit());
        for (std::size_t part = 0; part < std::min(parts, begin + 1); ++part) {
          Part longer = best[part][begin];
          if (longer.excess == std::numeric_limits<std::int64_t>::max()) continue;
          longer.excess += excess;
          longer.sent += sent;
          longer.begin = begin;
          if (longer.key() < best[part + 1][end].key()) best[part + 1][end] = longer;
        }
      }
    }
    std::size_t part = 1;
    for (std::size_t other = 2; other <= parts; ++other) {
      if (best[other][items].key() < best[part][items].key()) part = other;
    }
    std::vector<int> owners = division_.owners();
    for (std::size_t end = items, begin = 0; part > 0; --part, end = begin) {
      begin = best[part][end].begin;
      for (std::size_t at = begin; at < end; ++at) owners[order[at]] = static_cast<int>(part) - 1;
    }
    return owners;
  }

  // Per movable item, in their order, and per value of it: the place after the last item before it that uses the value.
  std::vector<std::vector<std::size_t>> previous_users() const {
    std::vector<std::vector<std::size_t>> before;
    std::vector<std::size_t> last(division_.count());
    for (std::size_t at = 0; at < problem_.movable.size(); ++at) {
      auto& places = before.emplace_back();
      for (const int value : division_.values_of(problem_.movable[at])) {
        places.push_back(last[value]);
        last[value] = at + 1;
      }
    }
    return before;
  }

  // The best one, but for some neighbours that are all on another rank.
  std::vector<int> shaken() {
    const auto below = [&](std::size_t count) { return static_cast<int>(random_() % count); };
    std::vector<int> owners = best_->owners();
    const std::vector<int>& movable = problem_.movable;
    const std::size_t wanted = 1 + below(std::clamp<std::size_t>(movable.size() / division_.ranks(), 2, kMostShaken));
    std::vector<int> chosen{movable[below(movable.size())]};
    for (std::size_t at = 0; at < chosen.size() && chosen.size() < wanted; ++at) {
      for (const int value : division_.values_of(chosen[at])) {
        for (const int user : division_.users(value)) {
          if (chosen.size() == wanted) break;
          if (!locked_[user] && std::ranges::count(chosen, user) == 0) chosen.push_back(user);
        }
      }
    }
    const int rank = below(division_.ranks());
    for (const int item : chosen) owners[item] = rank;
    return owners;
  }

  // Branch and bound, the items in the order of the visits.
  void go_through_all() {
    for (const int item : problem_.movable) division_.move(item, kNobody);
    exact_moves_ = kExactMoves;
    decide(0, 1);
  }

  // Ranks without anything placed by hand are alike: of those that are still empty, one is tried.
  void decide(std::size_t at, int used) {
    if (at == problem_.movable.size()) {
      best_ = division_;
      return;
    }
    const int item = problem_.movable[at];
    const int ranks = problem_.by_hand ? division_.ranks() : std::min(division_.ranks(), used + 1);
    for (int rank = 0; rank < ranks && exact_moves_ > 0; ++rank, --exact_moves_) {
      division_.move(item, rank);
      if (division_.score() < best_->score()) decide(at + 1, std::max(used, rank + 1));
    }
    division_.move(item, kNobody);
  }

  // The best one, in which the first item is on rank 0, where ranks are alike.
  std::vector<int> led_by_first() const {
    std::vector<int> owners = best_->owners();
    const bool free = !problem_.by_hand && !problem_.leader && division_.cost(0) == 0 && division_.values_of(0).empty();
    if (!free) return owners;
    const int first = owners[problem_.movable.front()];
    for (const int item : problem_.movable) {
      if (owners[item] == first || owners[item] == 0) owners[item] = first - owners[item];
    }
    return owners;
  }

  const Problem& problem_;
  Division division_;
  std::optional<Division> best_;
  std::vector<bool> locked_;  // per item
  std::int64_t looks_ = 0;
  int exact_moves_ = 0;
  std::mt19937 random_{kSeed};  // NOLINT(bugprone-random-generator-seed): the same plan each time
};

}  // namespace

std::vector<int> fewest_bytes(const Problem& problem, const Traffic& traffic) { return Search(problem, traffic).run(); }

}  // namespace lamina::plan
