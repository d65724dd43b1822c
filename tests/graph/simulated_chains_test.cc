// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <tuple>

#include "lamina/schedule/simulation.h"
#include "tests/graph/pretended_ranks.h"

namespace lamina::graph::testing {
namespace {

// Events in their order.
class Time {
 public:
  void at(std::int64_t time, std::function<void()> happens) { events_.emplace(time, std::move(happens)); }
  void later(std::int64_t delay, std::function<void()> happens) { at(now_ + delay, std::move(happens)); }
  std::int64_t now() const { return now_; }
  void run() {
    while (!events_.empty()) {
      auto event = events_.extract(events_.begin());
      now_ = event.key();
      event.mapped()();
    }
  }

 private:
  std::int64_t now_ = 0;
  std::multimap<std::int64_t, std::function<void()>> events_;
};

// One operation per visit; the last one is on rank 0 again, which has the loss.
struct Chain {
  NumberGraph graph;
  schedule::Chain simulated;
};

Chain drawn(std::mt19937_64& draw) {
  Chain chain;
  chain.graph.partitions = 2 + static_cast<int>(draw() % 3);
  const int visits = 3 + static_cast<int>(draw() % 4);
  const auto cost = [&] { return 1000 + static_cast<std::int64_t>(draw() % 1'000'000); };
  std::vector<int> ranks{0};
  while (static_cast<int>(ranks.size()) < visits || ranks.back() != 0) {
    const int next = static_cast<int>(ranks.size()) >= visits && ranks.back() != 0
                         ? 0
                         : static_cast<int>(draw() % static_cast<std::uint64_t>(chain.graph.partitions));
    if (next != ranks.back()) ranks.push_back(next);
  }
  for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
    Placed operation{base::Partition(ranks[i]), {}, {}, {true}};
    if (i > 0) operation.inputs.push_back({i - 1, 0});
    chain.graph.operations.push_back(std::move(operation));
    chain.simulated.visits.push_back({ranks[i], cost(), cost(), 0});
  }
  chain.graph.results = {{static_cast<int>(ranks.size()) - 1, 0}};
  chain.simulated.microbatches = 1 + static_cast<int>(draw() % 8);
  return chain;
}

// Rank, visit, backward, microbatch, begin.
using Turns = std::multiset<std::tuple<int, int, bool, std::int64_t, std::int64_t>>;

Turns of_simulation(const Chain& chain, const StepOptions& options) {
  Turns turns;
  const auto schedule = schedule::make_schedule(options.schedule, options.active_microbatches);
  for (const auto& turn : schedule::simulate(*schedule, chain.simulated)) {
    if (turn.visit == static_cast<int>(chain.simulated.visits.size())) continue;  // it computes nothing
    turns.emplace(turn.rank, turn.visit, turn.ticket.phase == schedule::Phase::kBackward, turn.ticket.microbatch.value,
                  turn.start);
  }
  return turns;
}

Turns of_ranks(const Chain& chain, const StepOptions& options) {
  Turns turns;
  Time time;
  std::vector<std::unique_ptr<PretendedRank>> ranks;
  std::vector<PretendedRank*> all;
  for (int rank = 0; rank < chain.graph.partitions; ++rank) {
    ranks.push_back(std::make_unique<PretendedRank>(
        chain.graph, rank, options, [&](std::function<void()> happens) { time.later(0, std::move(happens)); }));
    all.push_back(ranks.back().get());
    std::vector<int> visits;  // by segment
    for (int i = 0; i < static_cast<int>(chain.simulated.visits.size()); ++i) {
      if (chain.simulated.visits[i].rank == rank) visits.push_back(i);
    }
    all.back()->compute = [&, rank, visits](const Replica& replica, std::function<void()> rest) {
      if (replica.segment == static_cast<int>(visits.size())) return time.later(0, std::move(rest));
      const int visit = visits[replica.segment];
      const bool back = replica.pass == Direction::kBackward;
      turns.emplace(rank, visit, back, replica.microbatch.value, time.now());
      time.later(back ? chain.simulated.visits[visit].backward : chain.simulated.visits[visit].forward,
                 std::move(rest));
    };
  }
  for (auto* rank : all) rank->connect(all);
  for (auto* rank : all) rank->begin();
  time.run();
  for (auto* rank : all) rank->end();
  return turns;
}

TEST(SimulatedChains, RunAsTheSimulationSays) {
  for (int seed = 0; seed < 1000; ++seed) {
    std::mt19937_64 draw(seed);
    const auto chain = drawn(draw);
    StepOptions options{.schedule = seed % 2 == 0 ? "simple" : "interleaved",
                        .active_microbatches = 1 + static_cast<int>(draw() % 6),
                        .microbatches = chain.simulated.microbatches};
    ASSERT_EQ(of_ranks(chain, options), of_simulation(chain, options)) << "seed " << seed;
  }
}

}  // namespace
}  // namespace lamina::graph::testing
