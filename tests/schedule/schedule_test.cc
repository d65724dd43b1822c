// SPDX-License-Identifier: Apache-2.0
#include "lamina/schedule/schedule.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>

#include "lamina/base/error.h"
#include "lamina/schedule/simulation.h"

namespace lamina::schedule {
namespace {

// Any chain of unlike stages, with messages that overtake each other in an order given by the seed.
Chain any_chain() {
  Chain chain;
  chain.microbatches = *rc::gen::inRange(1, 13).as("microbatches");
  const int stages = *rc::gen::inRange(1, 7).as("stages");
  for (int rank = 0; rank < stages; ++rank) {
    chain.visits.push_back({rank, *rc::gen::inRange(0, 4), *rc::gen::inRange(0, 4), *rc::gen::inRange(0, 4)});
  }
  auto random = std::make_shared<std::mt19937>(*rc::gen::inRange(0, 1000000).as("seed"));
  chain.delay = [random] { return static_cast<std::int64_t>((*random)() % 8); };
  return chain;
}

int any_active() { return *rc::gen::inRange(1, 10).as("active microbatches"); }

void expect_complete(const Chain& chain, const std::vector<Turn>& turns) {
  std::map<std::tuple<int, base::Microbatch, Phase>, int> times;
  for (const Turn& turn : turns) ++times[{turn.rank, turn.ticket.microbatch, turn.ticket.phase}];
  for (const auto& [what, count] : times) RC_ASSERT(count == 1);
  RC_ASSERT(turns.size() == static_cast<std::size_t>(chain.microbatches) * (2 * chain.visits.size() + 2));
}

RC_GTEST_PROP(ScheduleProperty, EachMicrobatchGoesForwardAndBackwardOnceWhateverTheOrderOfMessages, ()) {
  const Chain chain = any_chain();
  const int active = any_active();
  expect_complete(chain, simulate(*simple_schedule(active), chain));
  expect_complete(chain, simulate(*interleaved_schedule(active), chain));
}

// Turns of weight parts in a step whose last microbatches are split: one at each visit that has one; rank 0 has one for
// all of its visits.
std::size_t weight_parts(const Chain& chain, const Schedule& schedule) {
  const auto has_weights = [](const Visit& visit) { return visit.weights > 0; };
  auto each = std::ranges::count_if(chain.visits, has_weights);
  const auto of_body =
      std::ranges::count_if(chain.visits, [&](const Visit& visit) { return visit.rank == 0 && has_weights(visit); });
  if (of_body > 0) each += 1 - of_body;
  return static_cast<std::size_t>(each * (chain.microbatches - schedule.first_split(chain.microbatches)));
}

// The ranks of a chain may come in any order, several times, and have weight parts of any length.
Chain any_way() {
  Chain chain = any_chain();
  for (Visit& visit : chain.visits) visit.weights = *rc::gen::inRange<std::int64_t>(0, visit.backward + 1);
  const auto ranks = static_cast<int>(chain.visits.size());
  for (int more = *rc::gen::inRange(0, 5).as("more visits"); more > 0; --more) {
    Visit visit{.rank = *rc::gen::inRange(0, ranks), .forward = *rc::gen::inRange(0, 4), .backward = 4};
    visit.weights = *rc::gen::inRange(0, 5);
    if (visit.rank != chain.visits.back().rank) chain.visits.push_back(visit);
  }
  return chain;
}

RC_GTEST_PROP(ScheduleProperty, ZeroBubbleDoesAllThatInterleavedDoesAndEachWeightPartOnce, ()) {
  const Chain chain = any_way();
  const auto schedule = zero_bubble_schedule(any_active(), *rc::gen::inRange(1, 4).as("partitions"));
  auto turns = simulate(*schedule, chain);
  const auto is_weights = [](const Turn& turn) { return turn.ticket.phase == Phase::kWeights; };
  std::map<std::pair<int, base::Microbatch>, std::int64_t> backwards;  // by visit: when it ended
  std::size_t parts = 0;
  for (const Turn& turn : turns) {
    if (turn.ticket.phase == Phase::kBackward) backwards[{turn.visit, turn.ticket.microbatch}] = turn.end;
    if (!is_weights(turn)) continue;
    ++parts;
    RC_ASSERT(turn.ticket.microbatch.value >= schedule->first_split(chain.microbatches));
    RC_ASSERT(backwards.at({turn.visit, turn.ticket.microbatch}) <= turn.start);
  }
  RC_ASSERT(parts == weight_parts(chain, *schedule));
  RC_ASSERT(turns.size() - parts == static_cast<std::size_t>(chain.microbatches) * (2 * chain.visits.size() + 2));
}

RC_GTEST_PROP(ScheduleProperty, ZeroBubbleCountsAMicrobatchUntilItsWeightPartsEnd, ()) {
  const Chain chain = any_way();
  const int active = any_active();
  const auto turns = simulate(*zero_bubble_schedule(active, *rc::gen::inRange(1, 4).as("partitions")), chain);
  std::map<base::Microbatch, std::int64_t> ends;
  for (const Turn& turn : turns) ends[turn.ticket.microbatch] = turn.end;
  for (const Turn& turn : turns) {
    if (turn.ticket.phase != Phase::kStart) continue;
    const auto counts = [&](const auto& each) {
      return each.first < turn.ticket.microbatch && each.second > turn.start;
    };
    RC_ASSERT(std::ranges::count_if(ends, counts) < active);
  }
}

RC_GTEST_PROP(ScheduleProperty, SimpleDoesNoBackwardBeforeAllForwards, ()) {
  const Chain chain = any_chain();
  const auto turns = simulate(*simple_schedule(any_active()), chain);
  const auto is_forward = [](const Turn& turn) {
    return turn.ticket.phase == Phase::kStart || turn.ticket.phase == Phase::kForward;
  };
  RC_ASSERT(std::is_partitioned(turns.begin(), turns.end(), is_forward));
}

RC_GTEST_PROP(ScheduleProperty, SimpleLimitsTheForwardsInFlight, ()) {
  const Chain chain = any_chain();
  const int active = any_active();
  for (const Turn& turn : simulate(*simple_schedule(active), chain)) {
    RC_ASSERT(turn.after.started - turn.after.forward_done <= active);
  }
}

RC_GTEST_PROP(ScheduleProperty, InterleavedLimitsTheMicrobatchesInFlight, ()) {
  const Chain chain = any_chain();
  const int active = any_active();
  for (const Turn& turn : simulate(*interleaved_schedule(active), chain)) {
    RC_ASSERT(turn.after.started - turn.after.finished <= active);
  }
}

// Turns of each rank: the phase and the microbatch of each turn, in the order in which they began.
std::map<int, std::vector<std::pair<Phase, int>>> by_rank(std::vector<Turn> turns) {
  std::ranges::stable_sort(turns, {}, &Turn::start);
  std::map<int, std::vector<std::pair<Phase, int>>> done;
  for (const Turn& turn : turns) {
    const auto microbatch = static_cast<int>(turn.ticket.microbatch.value);
    if (turn.rank > 0) done[turn.rank].emplace_back(turn.ticket.phase, microbatch);
  }
  return done;
}

RC_GTEST_PROP(ScheduleProperty, InterleavedWithOneMicrobatchInFlightIsThePlainLoopOnEachRank, ()) {
  const Chain chain = any_chain();
  std::vector<std::pair<Phase, int>> plain_loop;
  for (int i = 0; i < chain.microbatches; ++i) {
    plain_loop.emplace_back(Phase::kForward, i);
    plain_loop.emplace_back(Phase::kBackward, i);
  }
  const auto turns = simulate(*interleaved_schedule(1), chain);
  expect_complete(chain, turns);
  for (const auto& [rank, done] : by_rank(turns)) RC_ASSERT(done == plain_loop);
}

RC_GTEST_PROP(ScheduleProperty, MicrobatchesStartInTheirOrderWhateverTheOrderOfTheirThreads, ()) {
  const int active = any_active();
  const int next = *rc::gen::inRange(0, 8).as("next");
  std::vector<Ticket> waiting;
  for (int i = 0; i < 8; ++i) {
    if (i > next || (i == next && *rc::gen::arbitrary<bool>().as("it is there"))) {
      waiting.push_back({Phase::kStart, base::Microbatch(i), static_cast<std::uint64_t>(8 - i)});
    }
  }
  const bool there = !waiting.empty() && waiting.front().microbatch.value == next;
  const Progress progress{.microbatches = 8, .started = next, .forward_done = next, .finished = next};
  for (const auto& schedule :
       {simple_schedule(active), interleaved_schedule(active), zero_bubble_schedule(active, 2)}) {
    const auto chosen = schedule->pick(waiting, progress);
    RC_ASSERT(chosen.has_value() == there);
    if (chosen) RC_ASSERT(waiting.at(*chosen).microbatch.value == next);
  }
}

// Requests that wait on a rank, of any of `microbatches`.
std::vector<Ticket> any_requests(int microbatches) {
  std::vector<Ticket> waiting;
  for (int i = 0; i < *rc::gen::inRange(1, 8).as("requests"); ++i) {
    const auto phase = *rc::gen::element(Phase::kForward, Phase::kBackward);
    waiting.push_back({phase, base::Microbatch(*rc::gen::inRange(0, microbatches)), static_cast<std::uint64_t>(i)});
  }
  return waiting;
}

// Returns what `schedule` picks with `ahead` microbatches, none of those that wait, ahead.
const Ticket& picked(const Schedule& schedule, const std::vector<Ticket>& waiting, int ahead) {
  Progress progress;
  for (int i = 0; i < ahead; ++i) progress.ahead.insert(base::Microbatch(100 + i));
  return waiting.at(schedule.pick(waiting, progress).value());
}

// Expects a pick of that phase where one waits, and of its phase the oldest microbatch.
void expect_preferred(Phase phase, int ahead) {
  const auto waiting = any_requests(4);
  const Ticket& chosen = picked(*interleaved_schedule(any_active()), waiting, ahead);
  for (const Ticket& other : waiting) {
    if (other.phase == phase) RC_ASSERT(chosen.phase == phase);
    if (other.phase == chosen.phase) RC_ASSERT(chosen.microbatch <= other.microbatch);
  }
}

RC_GTEST_PROP(ScheduleProperty, InterleavedPrefersBackwardsWithTwoMicrobatchesAhead, ()) {
  expect_preferred(Phase::kBackward, *rc::gen::inRange(2, 5).as("ahead"));
}

RC_GTEST_PROP(ScheduleProperty, InterleavedPrefersForwardsWithFewerThanTwoAhead, ()) {
  expect_preferred(Phase::kForward, *rc::gen::inRange(0, 2).as("ahead"));
}

TEST(Schedule, InterleavedLetsWhatHasBegunGoOnForwardsFirst) {
  Progress progress{.microbatches = 8};
  for (int i = 0; i < 4; ++i) progress.go_on({Phase::kStart, base::Microbatch(i)});
  progress.go_on({Phase::kBackward, base::Microbatch(1)});
  std::vector<Ticket> waiting{{Phase::kForward, base::Microbatch(3), 0},   // its loss
                              {Phase::kBackward, base::Microbatch(1), 1},  // its next module
                              {Phase::kBackward, base::Microbatch(0), 2},
                              {Phase::kForward, base::Microbatch(1), 3}};  // once more, after its backward
  for (; !waiting.empty(); waiting.erase(waiting.begin())) {
    EXPECT_EQ(interleaved_schedule(8)->pick(waiting, progress), 0);
  }
}

// The most that a step takes, of the ideal (m + p - 1)(forward + backward), over up to 8 stages and 64 microbatches.
double worst_of_ideal(std::int64_t backward, const std::function<std::unique_ptr<Schedule>(int stages)>& schedule) {
  double worst = 0;
  for (int stages = 1; stages <= 8; ++stages) {
    for (int microbatches : {1, 2, 3, 4, 8, 16, 32, 64}) {
      const Chain chain = even_chain(stages, microbatches, 1, backward);
      const auto took = static_cast<double>(step_time(*schedule(stages), chain));
      const auto ideal = static_cast<double>((microbatches + stages - 1) * (1 + backward));
      worst = std::max(worst, took / ideal);
    }
  }
  return worst;
}

// Simulated time is exact: these are the schedules' own losses, before any cost of running them.
TEST(Schedule, SimpleIsIdealOnAnEvenChain) {
  const auto unlimited = [](int) { return simple_schedule(1000); };
  EXPECT_DOUBLE_EQ(worst_of_ideal(1, unlimited), 1.0);
  EXPECT_DOUBLE_EQ(worst_of_ideal(2, unlimited), 1.0);
}

TEST(Schedule, InterleavedIsIdealOnAnEvenChainWithTheDefaultWindow) {
  const auto twice = [](int stages) { return interleaved_schedule(2 * stages + 1); };
  EXPECT_DOUBLE_EQ(worst_of_ideal(1, twice), 1.0);
  EXPECT_DOUBLE_EQ(worst_of_ideal(2, twice), 1.0);
}

TEST(Schedule, InterleavedIsIdealOnAnEvenChainWithTwoMicrobatchesInFlightMoreThanStages) {
  const auto two_more = [](int stages) { return interleaved_schedule(stages + 2); };
  EXPECT_DOUBLE_EQ(worst_of_ideal(1, two_more), 1.0);
  EXPECT_DOUBLE_EQ(worst_of_ideal(2, two_more), 1.0);
}

// Messages take a fiftieth of a forward, and some of them twice that: ties fall either way.
TEST(Schedule, InterleavedIsNearTheIdealHoweverTiesFall) {
  for (int stages : {2, 3, 4, 8}) {
    for (int microbatches : {4, 8, 16, 32}) {
      Chain chain = even_chain(stages, microbatches, 1000, 2000);
      for (Visit& visit : chain.visits) visit.message = 20;
      const auto ideal = static_cast<double>((microbatches + stages - 1) * 3000);
      for (unsigned seed = 0; seed < 20; ++seed) {
        chain.delay = [random = std::mt19937(seed)]() mutable { return static_cast<std::int64_t>(random() % 20); };
        const auto took = static_cast<double>(step_time(*interleaved_schedule(2 * stages + 1), chain));
        EXPECT_LE(took, 1.03 * ideal) << stages << " stages, " << microbatches << " microbatches, seed " << seed;
      }
    }
  }
}

// A step of `zero_bubble` over that of 1F1B's ideal, on an even chain, or one that goes to the last rank and back.
// Messages take 3 % of a forward.
double of_1f1b(int stages, int microbatches, double weight_share, bool back = false) {
  constexpr std::int64_t kForward = 10'000, kBackward = 20'000;
  const int parts = back ? 2 : 1;
  Chain chain = even_chain(parts * stages, microbatches, kForward / parts, kBackward / parts,
                           static_cast<std::int64_t>(weight_share * kBackward) / parts);
  for (Visit& visit : chain.visits) {
    visit.rank = std::min(visit.rank, 2 * stages - 1 - visit.rank);
    visit.message = kForward * 3 / 100;
  }
  const auto took = static_cast<double>(step_time(*zero_bubble_schedule(2 * stages + 1, stages), chain));
  return took / static_cast<double>((microbatches + stages - 1) * (kForward + kBackward));
}

// The work of a rank, and the forwards before the last one's first: no step is shorter.
double bound(int stages, int microbatches, int parts = 1) {
  return ((stages - 1.0) / parts + 3.0 * microbatches) / (3.0 * (microbatches + stages - 1));
}

TEST(Schedule, ZeroBubbleIsNearItsBoundOnAnEvenChain) {
  for (const auto [stages, microbatches] : {std::pair(2, 8), std::pair(4, 8), std::pair(8, 16)}) {
    const double half = of_1f1b(stages, microbatches, 0.5);
    EXPECT_GE(half, bound(stages, microbatches));
    EXPECT_LE(half, bound(stages, microbatches) + 0.005) << stages << " stages, " << microbatches << " microbatches";
    const double back = of_1f1b(stages, microbatches, 0.5, /*back=*/true);
    EXPECT_GE(back, bound(stages, microbatches, 2));
    EXPECT_LE(back, bound(stages, microbatches, 2) + 0.005) << stages << " stages, " << microbatches << " microbatches";
  }
  EXPECT_LE(of_1f1b(4, 16, 0.5), 0.905);
  EXPECT_LE(of_1f1b(4, 8, 0.3), 0.86);
  EXPECT_LE(of_1f1b(8, 16, 0.3), 0.845);
}

// Chains of uneven visits, several of them on a rank. As any schedule that looks no step ahead, it is longer now and
// then.
TEST(Schedule, ZeroBubbleIsLongerThanInterleavedInOneChainOfAHundredAtMostAndNeverByATenth) {
  std::mt19937 random(1);
  const auto any = [&](int from, int to) {
    return from + static_cast<int>(random() % static_cast<unsigned>(to - from + 1));
  };
  int longer = 0;
  double sum = 0;
  constexpr int kChains = 10'000;
  for (int i = 0; i < kChains; ++i) {
    const int partitions = any(2, 6);
    Chain chain{.visits = {}, .microbatches = any(1, 16)};
    for (int visits = partitions + any(0, partitions), at = 0; at < visits; ++at) {
      const int rank = at < partitions ? at : any(0, partitions - 1);
      if (at > 0 && rank == chain.visits.back().rank) continue;
      Visit visit{.rank = rank, .forward = any(700, 1300), .backward = any(1400, 2600), .message = any(10, 60)};
      visit.weights = at == 0 ? visit.backward : visit.backward * any(25, 55) / 100;
      chain.visits.push_back(visit);
    }
    const int window = 2 * partitions + 1;
    const double ratio = static_cast<double>(step_time(*zero_bubble_schedule(window, partitions), chain)) /
                         static_cast<double>(step_time(*interleaved_schedule(window), chain));
    ASSERT_LE(ratio, 1.1) << i;
    if (ratio > 1.001) ++longer;
    sum += ratio;
  }
  EXPECT_LE(longer, kChains / 100);
  EXPECT_LE(sum / kChains, 0.92);
}

TEST(Schedule, InterleavedFreesEarlyWhatSimpleKeepsToTheEnd) {
  const Chain chain = even_chain(4, 32);
  const auto most_in_flight = [&](const Schedule& schedule) {
    int most = 0;
    for (const Turn& turn : simulate(schedule, chain)) most = std::max(most, turn.after.started - turn.after.finished);
    return most;
  };
  EXPECT_EQ(most_in_flight(*simple_schedule(6)), 32);
  EXPECT_LE(most_in_flight(*interleaved_schedule(6)), 6);
}

// The turns of rank 0 with their microbatches, in the order in which they began.
std::vector<std::pair<int, std::int64_t>> of_the_leading_rank(std::vector<Turn> turns) {
  std::ranges::stable_sort(turns, {}, &Turn::start);
  std::vector<std::pair<int, std::int64_t>> done;
  for (const Turn& turn : turns) {
    if (turn.rank == 0 && turn.end > turn.start) done.emplace_back(turn.ticket.microbatch.value, turn.end - turn.start);
  }
  return done;
}

TEST(Simulation, LetsTheStepBodyGoOnFromItsLastModuleToTheLossAndBack) {
  Chain chain{.visits = {{0, 0, 0, 0}, {1, 10, 20, 1}, {0, 30, 40, 0}}, .microbatches = 2};
  const std::vector<std::pair<int, std::int64_t>> whole{{0, 30}, {0, 40}, {1, 30}, {1, 40}};
  EXPECT_EQ(of_the_leading_rank(simulate(*interleaved_schedule(2), chain)), whole);
}

TEST(Simulation, OfAVisitForBackwardsOnlySendsForwardsPastIt) {
  Chain chain{.visits = {{0, 1, 1, 10}, {1, 1, 1, 10}, {2, 0, 0, 10, true}, {0, 1, 1, 0}}};
  const auto turns = simulate(*interleaved_schedule(1), chain);
  EXPECT_EQ(turns.back().end, 3 + 20 + 3 + 30);
  EXPECT_EQ(std::ranges::count(turns, 2, &Turn::rank), 1);
}

TEST(Schedule, IsFoundByName) {
  EXPECT_NE(make_schedule("simple", 1), nullptr);
  EXPECT_NE(make_schedule("interleaved", 1), nullptr);
  EXPECT_EQ(make_schedule("zero_bubble", 1, 3)->first_split(8), 2);
  EXPECT_EQ(make_schedule("zero_bubble", 1, 3)->first_split(4), 0);
  EXPECT_EQ(make_schedule("interleaved", 1, 3)->first_split(8), 8);
  EXPECT_THROW(make_schedule("1f1b", 1), base::ConfigError);
}

}  // namespace
}  // namespace lamina::schedule
