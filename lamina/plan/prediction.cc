// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/prediction.h"

#include <algorithm>
#include <limits>
#include <map>

#include "lamina/plan/tied_parameters.h"
#include "lamina/schedule/simulation.h"

namespace lamina::plan {

double step_us(const StepShape& shape, const Goal& goal) {
  const int window = std::max(goal.window(), 1);
  const int rounds = (goal.microbatches + window - 1) / window;
  const auto pass = [&](double path, double heaviest, int passes) {
    return std::max(path + (goal.microbatches - 1) * heaviest, passes * path);
  };
  if (goal.simple()) {
    return pass(shape.path_forward_us, shape.heaviest_forward_us, rounds) +
           pass(shape.path_backward_us, shape.heaviest_backward_us, 1);
  }
  return pass(shape.path_forward_us + shape.path_backward_us, shape.heaviest_us, rounds);
}

Prediction predict(const Route& route, const Assignment& owners, const Goal& goal) {
  Prediction result{std::vector<RankLoad>(goal.partitions), {}};
  StepShape& shape = result.shape;
  std::size_t at = 0;  // the leading rank
  std::int64_t value_bytes = 0;
  const auto go_to = [&](std::size_t rank) {
    if (rank == at) return;
    shape.path_forward_us += goal.link.time_us(value_bytes);
    shape.path_backward_us += goal.link.time_us(value_bytes);
    for (const std::size_t each : {at, rank}) result.ranks[each].messages_us += goal.link.rank_time_us(value_bytes);
    result.ranks[at].out_bytes += value_bytes;
    at = rank;
  };
  for (const Point& point : route.points) {
    const auto rank = static_cast<std::size_t>(owners[point.node].value);
    go_to(rank);
    result.ranks[rank].forward_us += point.forward_us;
    result.ranks[rank].backward_us += point.backward_us;
    shape.path_forward_us += point.forward_us;
    shape.path_backward_us += point.backward_us;
    value_bytes = point.value_bytes;
  }
  go_to(0);
  for (const RankLoad& rank : result.ranks) {
    shape.heaviest_forward_us = std::max(shape.heaviest_forward_us, rank.forward_us + rank.messages_us);
    shape.heaviest_backward_us = std::max(shape.heaviest_backward_us, rank.backward_us + rank.messages_us);
    shape.heaviest_us = std::max(shape.heaviest_us, rank.time_us());
  }
  return result;
}

namespace {

constexpr double kPerMicrosecond = 1000;
constexpr std::int64_t kMostTurns = 200'000;  // what takes some tenths of a second
constexpr std::int64_t kWindowsToSettle = 4;  // of so many microbatches the later ones do what those before did

std::int64_t ticks(double time_us) { return static_cast<std::int64_t>(kPerMicrosecond * time_us); }

// The visits of a microbatch. A gradient comes through the modules that returned its tensor, on other ranks too.
class Visits {
 public:
  explicit Visits(const Link& link) : link_(link), visits_{{0, 0, 0, 0}} {}

  std::vector<schedule::Visit> run(const Route& route, const Assignment& owners) {
    for (const Point& point : route.points) {
      visit(static_cast<int>(owners[point.node].value));
      visits_.back().forward += ticks(point.forward_us);
      visits_.back().backward += ticks(point.backward_us);
      value_bytes_ = point.value_bytes;
      for (const int node : point.ends) return_through(static_cast<int>(owners[node].value));
    }
    go_to(0);
    return std::move(visits_);
  }

 private:
  void visit(int rank) {
    const schedule::Visit next = go_to(rank);
    if (visits_.back().backward_only || visits_.back().rank != rank) visits_.push_back(next);
  }

  void return_through(int rank) {
    if (rank != visits_.back().rank)
      visits_.push_back({.rank = rank, .forward = 0, .backward = 0, .backward_only = true});
  }

  // The visit that follows, with its part of the messages to it.
  schedule::Visit go_to(int rank) {
    while (visits_.back().backward_only && visits_.back().rank == rank) visits_.pop_back();
    schedule::Visit next{.rank = rank, .forward = 0, .backward = 0};
    if (visits_.back().rank == rank) return next;
    auto from = visits_.end() - 1;
    for (; from->backward_only; --from) {
      from->backward += 2 * ticks(link_.rank_time_us(0));
      from->message = ticks(link_.time_us(0));
    }
    const bool stays = from->rank == rank;
    const std::int64_t bytes = stays ? 0 : value_bytes_;
    const std::int64_t each = ticks(link_.rank_time_us(bytes));
    for (schedule::Visit* const side : {&*from, &next}) {
      if (!stays) side->forward += each;
      side->backward += each;
    }
    from->message = ticks(link_.time_us(bytes));
    return next;
  }

  const Link& link_;
  std::vector<schedule::Visit> visits_;
  std::int64_t value_bytes_ = 0;
};

schedule::Chain chain_of(const Route& route, const Assignment& owners, const Goal& goal) {
  return {.visits = Visits(goal.link).run(route, owners), .microbatches = goal.microbatches};
}

// The number of microbatches whose turns are few enough to simulate: at least one.
int simulated_microbatches(const Goal& goal, std::size_t visits) {
  const std::int64_t most = kMostTurns / (2 * static_cast<std::int64_t>(visits) + 2);
  const std::int64_t settled = std::min<std::int64_t>(goal.microbatches, kWindowsToSettle * goal.window());
  return static_cast<int>(std::clamp<std::int64_t>(most, 1, settled));
}

}  // namespace

double simulated_step_us(const Route& route, const Assignment& owners, const Goal& goal) {
  schedule::Chain chain = chain_of(route, owners, goal);
  chain.microbatches = simulated_microbatches(goal, chain.visits.size());
  const auto schedule = schedule::make_schedule(goal.schedule, goal.window());
  const double simulated = static_cast<double>(schedule::step_time(*schedule, chain)) / kPerMicrosecond;
  const int left = goal.microbatches - chain.microbatches;
  if (left == 0) return simulated;
  const StepShape shape = predict(route, owners, goal).shape;
  return simulated +
         left * (goal.simple() ? shape.heaviest_forward_us + shape.heaviest_backward_us : shape.heaviest_us);
}

std::int64_t simulated_turns(const Route& route, const Goal& goal) {
  const std::size_t visits = route.points.size();
  return simulated_microbatches(goal, visits) * (2 * static_cast<std::int64_t>(visits) + 2);
}

std::vector<int> simulated_held(const Route& route, const Assignment& owners, const Goal& goal) {
  schedule::Chain chain = chain_of(route, owners, goal);
  const std::int64_t most_microbatches = kMostTurns / (2 * static_cast<std::int64_t>(chain.visits.size()) + 2);
  if (goal.microbatches > most_microbatches) {
    const bool settles = !goal.simple() && kWindowsToSettle * goal.window() <= most_microbatches;
    if (!settles) return std::vector<int>(goal.partitions, goal.held());
    chain.microbatches = static_cast<int>(most_microbatches);
  }
  chain.delay = [] { return 1; };  // what would come just as a rank chooses comes just after, as it mostly does
  struct Held {
    std::int64_t from = std::numeric_limits<std::int64_t>::max();
    std::int64_t to = 0;
  };
  std::vector<std::map<base::Microbatch, Held>> ranks(goal.partitions);
  for (const schedule::Turn& turn : schedule::simulate(*schedule::make_schedule(goal.schedule, goal.window()), chain)) {
    Held& held = ranks[turn.rank][turn.ticket.microbatch];
    held = {std::min(held.from, turn.start), std::max(held.to, turn.end)};
  }
  std::vector<int> most;
  for (const auto& microbatches : ranks) {
    std::map<std::int64_t, int> changes;
    for (const auto& [microbatch, held] : microbatches) {
      ++changes[held.from];
      --changes[held.to];
    }
    int now = 0, largest = 0;
    for (const auto& [time, change] : changes) largest = std::max(largest, now += change);
    most.push_back(largest);
  }
  return most;
}

std::vector<std::int64_t> memory_bytes(const ModuleTree& tree, const Assignment& owners, const std::vector<int>& held) {
  const std::vector<std::int64_t> parameter_bytes = group_bytes(tree);
  std::vector<std::int64_t> memory(held.size());
  for (std::size_t node = 0; node < tree.size(); ++node) {
    const auto rank = owners[node].value;
    memory[rank] += held_bytes(parameter_bytes[node], tree[node].activation_bytes, held[rank]);
  }
  return memory;
}

std::vector<std::int64_t> memory_bytes(const ModuleTree& tree, const Assignment& owners, const Goal& goal) {
  return memory_bytes(tree, owners, std::vector<int>(goal.partitions, goal.held()));
}

}  // namespace lamina::plan
