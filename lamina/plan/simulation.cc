// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/simulation.h"

#include <map>
#include <utility>

namespace lamina::plan {
namespace {

class Simulation {
 public:
  Simulation(const Schedule& schedule, const Chain& chain) : schedule_(schedule), chain_(chain), ranks_(chain.stages) {
    progress_.microbatches = chain.microbatches;
    for (int i = 0; i < chain.microbatches; ++i) send(0, Phase::kStart, base::Microbatch(i), 0);
  }

  std::vector<Turn> run() {
    while (!events_.empty()) {
      const auto next = events_.begin();
      now_ = next->first.first;
      const std::function<void()> event = std::move(next->second);
      events_.erase(next);
      event();
      // What happens at the same time is known to a rank before it picks.
      if (events_.empty() || events_.begin()->first.first > now_) pick_everywhere();
    }
    return std::move(turns_);
  }

 private:
  struct RankState {
    std::vector<Ticket> waiting;
    bool busy = false;
  };

  void at(std::int64_t time, std::function<void()> event) { events_[{time, order_++}] = std::move(event); }

  void send(int rank, Phase phase, base::Microbatch microbatch, std::int64_t delay) {
    at(now_ + delay, [=, this] {
      if (phase == Phase::kBackwardStart) ++progress_.forward_done;
      ranks_[rank].waiting.push_back({phase, microbatch, order_++});
    });
  }

  void pick_everywhere() {
    for (int rank = 0; rank < chain_.stages; ++rank) {
      if (ranks_[rank].busy) continue;
      const auto chosen = schedule_.pick(ranks_[rank].waiting, rank == 0 ? progress_ : Progress{});
      if (chosen) begin(rank, *chosen);
    }
  }

  void begin(int rank, std::size_t chosen) {
    auto& waiting = ranks_[rank].waiting;
    const Ticket ticket = waiting.at(chosen);
    waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(chosen));
    ranks_[rank].busy = true;
    if (ticket.phase == Phase::kStart) ++progress_.started;
    at(now_ + cost(rank, ticket.phase), [=, this, start = now_] { end(rank, ticket, start); });
  }

  std::int64_t cost(int rank, Phase phase) const {
    if (phase == Phase::kStart || (phase == Phase::kForward && rank > 0)) return chain_.forward;
    return phase == Phase::kBackward ? chain_.backward : 0;
  }

  void end(int rank, const Ticket& ticket, std::int64_t start) {
    ranks_[rank].busy = false;
    const int last = chain_.stages - 1;
    const bool returned = rank == 0 && ticket.phase == Phase::kForward;
    if (returned) {
      send(0, Phase::kBackwardStart, ticket.microbatch, 0);
    } else if (ticket.phase == Phase::kStart || ticket.phase == Phase::kForward) {
      send(rank == last ? 0 : rank + 1, Phase::kForward, ticket.microbatch, chain_.delay());
    } else if (ticket.phase == Phase::kBackwardStart) {
      send(last, Phase::kBackward, ticket.microbatch, chain_.delay());
    } else if (rank > 0) {
      send(rank - 1, Phase::kBackward, ticket.microbatch, chain_.delay());
    } else {
      ++progress_.finished;
    }
    turns_.push_back({start, now_, rank, ticket, progress_});
  }

  const Schedule& schedule_;
  const Chain chain_;
  std::vector<RankState> ranks_;
  Progress progress_;
  std::int64_t now_ = 0;
  std::uint64_t order_ = 0;
  std::map<std::pair<std::int64_t, std::uint64_t>, std::function<void()>> events_;  // by time, then by order
  std::vector<Turn> turns_;
};

}  // namespace

std::vector<Turn> simulate(const Schedule& schedule, const Chain& chain) { return Simulation(schedule, chain).run(); }

std::int64_t step_time(const Schedule& schedule, const Chain& chain) { return simulate(schedule, chain).back().end; }

}  // namespace lamina::plan
