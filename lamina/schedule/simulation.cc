// SPDX-License-Identifier: Apache-2.0
#include "lamina/schedule/simulation.h"

#include <algorithm>
#include <queue>
#include <tuple>
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
      const Event next = events_.top();
      events_.pop();
      now_ = next.time;
      if (next.ends) {
        end(next.turn);
      } else {
        arrive(next.turn);
      }
      // Events of one moment are known to a rank before it picks.
      if (events_.empty() || events_.top().time > now_) pick_everywhere();
    }
    return std::move(turns_);
  }

 private:
  // A turn has ended, or a thread that wants one has come.
  struct Event {
    std::int64_t time = 0;
    std::uint64_t order = 0;  // of those of one moment
    bool ends = false;
    Turn turn;

    bool operator>(const Event& other) const { return std::tie(time, order) > std::tie(other.time, other.order); }
  };

  struct RankState {
    std::vector<Ticket> waiting;
    std::vector<int> visits;  // of each that waits
    Progress progress;
    bool busy = false;
  };

  void send(const Ticket& ticket, int visit, std::int64_t delay) {
    events_.push({now_ + delay, order_++, false, {.rank = rank_of(visit), .visit = visit, .ticket = ticket}});
  }

  void arrive(Turn turn) {
    if (turn.ticket.phase == Phase::kBackwardStart) ++leader().forward_done;
    turn.ticket.arrival = order_++;
    ranks_[turn.rank].waiting.push_back(turn.ticket);
    ranks_[turn.rank].visits.push_back(turn.visit);
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
    const Ticket ticket = waiting[chosen];
    const int visit = visits[chosen];
    waiting.erase(waiting.begin() + chosen);
    visits.erase(visits.begin() + chosen);
    compute(ticket, visit);
  }

  void compute(const Ticket& ticket, int visit) {
    const Turn turn{.start = now_, .rank = rank_of(visit), .visit = visit, .ticket = ticket};
    ranks_[turn.rank].busy = true;
    ranks_[turn.rank].progress.go_on(ticket);
    events_.push({now_ + cost(turn), order_++, true, turn});
  }

  Progress& leader() { return ranks_[0].progress; }

  int rank_of(int visit) const { return visit == end_ ? 0 : chain_.visits[visit].rank; }

  std::int64_t cost(const Turn& turn) const {
    if (turn.visit == end_) return 0;
    return turn.ticket.phase == Phase::kBackward ? chain_.visits[turn.visit].backward
                                                 : chain_.visits[turn.visit].forward;
  }

  std::int64_t message_between(int one, int other) const {
    return rank_of(one) == rank_of(other) ? 0 : chain_.visits[std::min(one, other)].message + chain_.delay();
  }

  int forward_after(int visit) const {
    do ++visit;
    while (visit < end_ && chain_.visits[visit].backward_only);
    return visit;
  }

  // The step body computes the last visit itself.
  bool ends_in_body() const { return rank_of(end_ - 1) == 0; }

  void end(Turn turn) {
    ranks_[turn.rank].busy = false;
    const auto& [phase, microbatch, arrival] = turn.ticket;
    if (phase == Phase::kBackwardStart && ends_in_body()) {
      compute({Phase::kBackward, microbatch, order_++}, end_ - 1);
    } else if (phase == Phase::kBackwardStart) {
      send({Phase::kBackward, microbatch}, end_ - 1, message_between(end_ - 1, end_));
    } else if (phase == Phase::kBackward && turn.visit > 0) {
      send({Phase::kBackward, microbatch}, turn.visit - 1, message_between(turn.visit - 1, turn.visit));
    } else if (phase == Phase::kBackward) {
      ++leader().finished;
    } else if (turn.visit == end_) {
      send({Phase::kBackwardStart, microbatch}, end_, 0);
    } else if (const int next = forward_after(turn.visit); next == end_ && ends_in_body()) {
      compute({Phase::kForward, microbatch, order_++}, end_);
    } else {
      send({Phase::kForward, microbatch}, next, message_between(turn.visit, next));
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
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
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
