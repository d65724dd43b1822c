// SPDX-License-Identifier: Apache-2.0
#include "lamina/schedule/simulation.h"

#include <algorithm>
#include <array>
#include <functional>
#include <queue>
#include <tuple>
#include <utility>

namespace lamina::schedule {
namespace {

enum Direction : std::uint8_t { kOfForward, kOfBackward };

int ranks_of(const Workload& workload) {
  int ranks = 1;
  for (const Piece& piece : workload.pieces) ranks = std::max(ranks, piece.work.rank + 1);
  return ranks;
}

// Per piece, of a pass: how much it waits for, who waits for it, and the one that goes on after it.
struct Passes {
  std::vector<int> needs;
  std::vector<std::vector<Need>> needed_by;
  std::vector<int> then;
};

std::array<Passes, 2> passes_of(const std::vector<Piece>& pieces) {
  const auto size = pieces.size();
  const Passes none{std::vector<int>(size), std::vector<std::vector<Need>>(size), std::vector<int>(size, -1)};
  std::array<Passes, 2> passes{none, none};
  const auto count = [&](Direction pass, int at, const std::vector<Need>& needs) {
    passes[pass].needs[at] += static_cast<int>(needs.size());
    for (const Need& need : needs) passes[pass].needed_by[need.piece].push_back({at, need.time});
  };
  const auto follow = [&](Direction pass, int at, int then) {
    passes[pass].then[at] = then;
    ++passes[pass].needs[then];
  };
  for (int at = 0; at < static_cast<int>(size); ++at) {
    count(kOfForward, at, pieces[at].forward_needs);
    count(kOfBackward, at, pieces[at].backward_needs);
    if (pieces[at].before < 0) continue;
    follow(kOfForward, pieces[at].before, at);
    follow(kOfBackward, at, pieces[at].before);
  }
  return passes;
}

// The weight part that follows the backward of each piece: all of its call's, after the first.
std::vector<std::int64_t> weights_of(const std::vector<Piece>& pieces) {
  std::vector<std::int64_t> weights(pieces.size());
  for (int at = static_cast<int>(pieces.size()) - 1; at >= 0; --at) {
    weights[at] += about(TurnKind::kWeights).time(pieces[at].work, /*split=*/true);
    if (pieces[at].before >= 0) weights[pieces[at].before] += std::exchange(weights[at], 0);
  }
  return weights;
}

// A number that is drawn for each turn, from -1 to 1.
double drawn(std::uint64_t draw, const Ticket& ticket, int piece) {
  std::uint64_t bits = draw;
  for (const auto part : {static_cast<std::uint64_t>(ticket.phase), static_cast<std::uint64_t>(ticket.microbatch.value),
                          static_cast<std::uint64_t>(piece)}) {
    bits = (bits ^ part) + 0x9e3779b97f4a7c15;  // splitmix64
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
    bits ^= bits >> 31;
  }
  return static_cast<double>(static_cast<std::int64_t>(bits)) * 0x1p-63;
}

class Simulation {
 public:
  Simulation(const Schedule& schedule, const Workload& workload)
      : schedule_(schedule),
        workload_(workload),
        pieces_(workload_.pieces),
        loss_(static_cast<int>(pieces_.size()) - 1),
        first_split_(schedule.first_split(workload.microbatches)),
        weights_(weights_of(pieces_)),
        passes_(passes_of(pieces_)),
        ranks_(ranks_of(workload)),
        turns_left_(workload.microbatches, static_cast<int>(pieces_.size())) {
    leader().microbatches = workload.microbatches;
    for (int i = 0; i < workload.microbatches; ++i) {
      for (const Direction pass : {kOfForward, kOfBackward})
        missing_[pass].insert(missing_[pass].end(), passes_[pass].needs.begin(), passes_[pass].needs.end());
    }
    turns_.reserve(2 * pieces_.size() * workload.microbatches);
    for (int i = 0; i < workload.microbatches; ++i) send({Phase::kStart, base::Microbatch(i)}, 0, 0, Event::kThread);
  }

  std::vector<Turn> run() {
    while (!events_.empty()) {
      const Event next = events_.top();
      events_.pop();
      now_ = next.time;
      if (next.what == Event::kEnd) {
        end(next.piece);
      } else if (next.what == Event::kThread || is_last_need(next)) {
        arrive(next);
      }
      // Events of one moment are known to a rank before it picks.
      if (events_.empty() || events_.top().time > now_) pick_everywhere();
    }
    return std::move(turns_);
  }

 private:
  // A turn has ended, a message has come, or a thread that wants a turn.
  struct Event {
    enum What : std::uint8_t { kEnd, kMessage, kThread };
    std::int64_t time = 0;
    std::uint64_t order = 0;  // of those of one moment
    What what = kThread;
    int piece = 0;
    Ticket ticket;

    bool operator>(const Event& other) const { return std::tie(time, order) > std::tie(other.time, other.order); }
  };

  struct RankState {
    std::vector<Ticket> waiting;
    std::vector<int> pieces;  // of each that waits
    Progress progress;
    Turn turn;  // while it is busy
    bool busy = false;
    bool asked = true;  // something has happened that its next pick may depend on
  };

  void send(const Ticket& ticket, int piece, std::int64_t delay, Event::What what) {
    events_.push({now_ + delay, order_++, what, piece, ticket});
  }

  // True where the ticket's pass of a piece waits for nothing else.
  bool is_last_need(const Event& message) {
    const auto pass = message.ticket.phase == Phase::kBackward ? kOfBackward : kOfForward;
    return --missing(pass, message.ticket.microbatch, message.piece) == 0;
  }

  int& missing(Direction pass, base::Microbatch microbatch, int piece) {
    return missing_[pass][microbatch.value * static_cast<std::int64_t>(pieces_.size()) + piece];
  }

  void arrive(const Event& event) {
    if (event.ticket.phase == Phase::kBackwardStart) ++leader().forward_done;
    RankState& rank = ranks_[pieces_[event.piece].work.rank];
    rank.waiting.push_back({event.ticket.phase, event.ticket.microbatch, order_++});
    rank.pieces.push_back(event.piece);
    rank.asked = true;
  }

  void pick_everywhere() {
    for (RankState& rank : ranks_) {
      if (!std::exchange(rank.asked, false) || rank.busy || rank.waiting.empty()) continue;
      const auto chosen = schedule_.pick(rank.waiting, rank.progress);
      if (chosen) begin(rank, static_cast<std::ptrdiff_t>(*chosen));
    }
  }

  void begin(RankState& rank, std::ptrdiff_t chosen) {
    const Ticket ticket = rank.waiting[chosen];
    const int piece = rank.pieces[chosen];
    rank.waiting.erase(rank.waiting.begin() + chosen);
    rank.pieces.erase(rank.pieces.begin() + chosen);
    compute(ticket, piece);
  }

  bool splits(base::Microbatch microbatch, int piece) const {
    return microbatch.value >= first_split_ && pieces_[piece].work.weights > 0;
  }

  void compute(const Ticket& ticket, int piece) {
    RankState& rank = ranks_[pieces_[piece].work.rank];
    rank.turn = {.start = now_,
                 .rank = pieces_[piece].work.rank,
                 .visit = piece,
                 .ticket = ticket,
                 .split = splits(ticket.microbatch, piece)};
    rank.busy = true;
    rank.progress.go_on(ticket);
    send(ticket, piece, cost(rank.turn), Event::kEnd);
  }

  Progress& leader() { return ranks_[0].progress; }

  std::int64_t cost(const Turn& turn) const {
    const Phase phase = turn.ticket.phase;
    const TurnKind kind = phase == Phase::kBackwardStart ? TurnKind::kBackward : kind_of(phase);
    const std::int64_t time =
        phase == Phase::kWeights ? weights_[turn.visit] : about(kind).time(pieces_[turn.visit].work, turn.split);
    if (workload_.jitter == 0) return time;
    const double part = 1 + workload_.jitter * drawn(workload_.draw, turn.ticket, turn.visit);
    return static_cast<std::int64_t>(part * static_cast<double>(time));
  }

  // The input part of a call's backward has ended.
  void leave_weights(const Turn& turn) {
    if (turn.ticket.microbatch.value < first_split_ || weights_[turn.visit] == 0) return;
    ++turns_left_[turn.ticket.microbatch.value];
    send({Phase::kWeights, turn.ticket.microbatch}, turn.visit, 0, Event::kThread);
  }

  // The pass of a piece has ended: what waits for it goes on.
  void go_on(Direction pass, const Turn& turn) {
    const Phase phase = pass == kOfForward ? Phase::kForward : Phase::kBackward;
    for (const Need& next : passes_[pass].needed_by[turn.visit]) {
      const bool elsewhere = pieces_[next.piece].work.rank != turn.rank;
      const std::int64_t delay = elsewhere ? next.time + workload_.delay() : 0;
      send({phase, turn.ticket.microbatch}, next.piece, delay, Event::kMessage);
    }
    const int then = passes_[pass].then[turn.visit];
    if (then < 0 || --missing(pass, turn.ticket.microbatch, then) > 0) return;
    compute({phase, turn.ticket.microbatch, order_++}, then);
  }

  void end(int piece) {
    RankState& rank = ranks_[pieces_[piece].work.rank];
    rank.busy = false;
    rank.asked = ranks_[0].asked = true;
    Turn turn = rank.turn;
    const Phase phase = turn.ticket.phase;
    if (phase == Phase::kStart || phase == Phase::kForward) {
      go_on(kOfForward, turn);
      if (piece == loss_) send({Phase::kBackwardStart, turn.ticket.microbatch}, piece, 0, Event::kThread);
    } else {
      if (phase == Phase::kBackward) leave_weights(turn);
      if (--turns_left_[turn.ticket.microbatch.value] == 0) ++leader().finished;
      if (phase != Phase::kWeights) go_on(kOfBackward, turn);
    }
    turn.end = now_;
    turn.after = {leader().started, leader().forward_done, leader().finished};
    turns_.push_back(turn);
  }

  const Schedule& schedule_;
  const Workload workload_;
  const std::vector<Piece>& pieces_;
  const int loss_;
  const int first_split_;
  const std::vector<std::int64_t> weights_;
  const std::array<Passes, 2> passes_;
  std::array<std::vector<int>, 2> missing_;  // by pass, microbatch and piece
  std::vector<RankState> ranks_;
  std::vector<int> turns_left_;  // of backwards and weight parts, by microbatch
  std::int64_t now_ = 0;
  std::uint64_t order_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<Turn> turns_;
};

}  // namespace

std::vector<Turn> simulate(const Schedule& schedule, const Workload& workload) {
  return Simulation(schedule, workload).run();
}

std::vector<Turn> simulate(const Schedule& schedule, const Chain& chain) {
  return simulate(schedule, workload_of(chain));
}

std::int64_t step_time(const Schedule& schedule, const Workload& workload) {
  return simulate(schedule, workload).back().end;
}

std::int64_t step_time(const Schedule& schedule, const Chain& chain) { return step_time(schedule, workload_of(chain)); }

}  // namespace lamina::schedule
