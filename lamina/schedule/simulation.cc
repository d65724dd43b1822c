// SPDX-License-Identifier: Apache-2.0
#include "lamina/schedule/simulation.h"

#include <algorithm>
#include <map>
#include <utility>

namespace lamina::schedule {
namespace {

int ranks_of(const Chain& chain) {
  int ranks = 1;
  for (const Visit& visit : chain.visits) ranks = std::max(ranks, visit.rank + 1);
  return ranks;
}

class Simulation {
 public:
  Simulation(const Schedule& schedule, const Chain& chain)
      : schedule_(schedule), chain_(chain), end_(static_cast<int>(chain.visits.size())), ranks_(ranks_of(chain)) {
    leader().microbatches = chain.microbatches;
    for (int i = 0; i < chain.microbatches; ++i) send({Phase::kStart, base::Microbatch(i)}, 0, 0);
  }

  std::vector<Turn> run() {
    while (!events_.empty()) {
      const auto next = events_.begin();
      now_ = next->first.first;
      const std::function<void()> event = std::move(next->second);
      events_.erase(next);
      event();
      // Events of one moment are known to a rank before it picks.
      if (events_.empty() || events_.begin()->first.first > now_) pick_everywhere();
    }
    return std::move(turns_);
  }

 private:
  struct RankState {
    std::vector<Ticket> waiting;
    std::vector<int> visits;  // of each that waits
    Progress progress;
    bool busy = false;
  };

  void at(std::int64_t time, std::function<void()> event) { events_[{time, order_++}] = std::move(event); }

  void send(Ticket ticket, int visit, std::int64_t delay) {
    at(now_ + delay, [=, this]() mutable {
      if (ticket.phase == Phase::kBackwardStart) ++leader().forward_done;
      ticket.arrival = order_++;
      RankState& rank = ranks_[rank_of(visit)];
      rank.waiting.push_back(ticket);
      rank.visits.push_back(visit);
    });
  }

  void pick_everywhere() {
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      if (ranks_[rank].busy || ranks_[rank].waiting.empty()) continue;
      const auto chosen = schedule_.pick(ranks_[rank].waiting, ranks_[rank].progress);
      if (chosen) begin(rank, static_cast<std::ptrdiff_t>(*chosen));
    }
  }

  void begin(int rank, std::ptrdiff_t chosen) {
    auto& [waiting, visits, progress, busy] = ranks_[rank];
    Turn turn{.start = now_, .rank = rank, .visit = visits[chosen], .ticket = waiting[chosen]};
    waiting.erase(waiting.begin() + chosen);
    visits.erase(visits.begin() + chosen);
    busy = true;
    progress.go_on(turn.ticket);
    at(now_ + cost(turn), [=, this] { end(turn); });
  }

  Progress& leader() { return ranks_[0].progress; }

  int rank_of(int visit) const { return visit == end_ ? 0 : chain_.visits[visit].rank; }

  std::int64_t cost(const Turn& turn) const {
    if (turn.visit == end_) return 0;
    return turn.ticket.phase == Phase::kBackward ? chain_.visits[turn.visit].backward
                                                 : chain_.visits[turn.visit].forward;
  }

  std::int64_t message_after(int visit) const { return chain_.visits[visit].message + chain_.delay(); }

  void end(Turn turn) {
    ranks_[turn.rank].busy = false;
    const auto& [phase, microbatch, arrival] = turn.ticket;
    if (phase == Phase::kBackwardStart) {
      send({Phase::kBackward, microbatch}, end_ - 1, message_after(end_ - 1));
    } else if (phase == Phase::kBackward && turn.visit > 0) {
      send({Phase::kBackward, microbatch}, turn.visit - 1, message_after(turn.visit - 1));
    } else if (phase == Phase::kBackward) {
      ++leader().finished;
    } else if (turn.visit == end_) {
      send({Phase::kBackwardStart, microbatch}, end_, 0);
    } else {
      send({Phase::kForward, microbatch}, turn.visit + 1, message_after(turn.visit));
    }
    turn.end = now_;
    turn.after = {leader().started, leader().forward_done, leader().finished};
    turns_.push_back(turn);
  }

  const Schedule& schedule_;
  const Chain chain_;
  const int end_;
  std::vector<RankState> ranks_;
  std::int64_t now_ = 0;
  std::uint64_t order_ = 0;
  std::map<std::pair<std::int64_t, std::uint64_t>, std::function<void()>> events_;  // by time, then by order
  std::vector<Turn> turns_;
};

}  // namespace

Chain even_chain(int stages, int microbatches, std::int64_t forward, std::int64_t backward) {
  Chain chain;
  for (int rank = 0; rank < stages; ++rank) chain.visits.push_back({rank, forward, backward, 0});
  chain.microbatches = microbatches;
  return chain;
}

std::vector<Turn> simulate(const Schedule& schedule, const Chain& chain) { return Simulation(schedule, chain).run(); }

std::int64_t step_time(const Schedule& schedule, const Chain& chain) { return simulate(schedule, chain).back().end; }

}  // namespace lamina::schedule
