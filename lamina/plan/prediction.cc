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
constexpr std::int64_t kMostTurns = 200'000;  // what takes about a second
constexpr std::int64_t kWindowsToSettle = 4;  // of so many microbatches the later ones do what those before did

schedule::Chain chain_of(const Route& route, const Assignment& owners, const Goal& goal) {
  const auto ticks = [](double time_us) { return static_cast<std::int64_t>(kPerMicrosecond * time_us); };
  schedule::Chain chain;
  chain.microbatches = goal.microbatches;
  chain.visits.push_back({0, 0, 0, 0});
  std::int64_t value_bytes = 0;
  const auto work = [&](schedule::Visit& visit, double forward_us, double backward_us) {
    visit.forward += ticks(forward_us);
    visit.backward += ticks(backward_us);
  };
  const auto send = [&](schedule::Visit& from) {
    const double each = goal.link.rank_time_us(value_bytes);
    work(from, each, each);
    from.message = ticks(goal.link.time_us(value_bytes));
    return each;
  };
  for (const Point& point : route.points) {
    const auto rank = static_cast<int>(owners[point.node].value);
    if (rank != chain.visits.back().rank) {
      const double each = send(chain.visits.back());
      chain.visits.push_back({rank, 0, 0, 0});
      work(chain.visits.back(), each, each);
    }
    work(chain.visits.back(), point.forward_us, point.backward_us);
    value_bytes = point.value_bytes;
  }
  if (chain.visits.back().rank != 0) send(chain.visits.back());
  return chain;
}

}  // namespace

double simulated_step_us(const Route& route, const Assignment& owners, const Goal& goal) {
  const auto schedule = schedule::make_schedule(goal.schedule, goal.window());
  return static_cast<double>(schedule::step_time(*schedule, chain_of(route, owners, goal))) / kPerMicrosecond;
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
