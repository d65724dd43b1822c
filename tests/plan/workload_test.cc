// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/workload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>

#include "lamina/plan/prediction.h"
#include "lamina/schedule/simulation.h"
#include "tests/plan/trees.h"

namespace lamina::plan {
namespace {

using testing::ElementsAre;

constexpr std::int64_t kBytes = 8;

// A stretch of 10 us forward and 20 backward that reads values of others.
Stretch stretch(int at, const std::vector<int>& reads) {
  Stretch made;
  made.at = at;
  made.forward_us = 10;
  made.backward_us = 20;
  made.value_bytes = kBytes;
  made.works = true;
  made.reads.emplace();
  for (const int read : reads) made.reads->push_back({read, kBytes});
  return made;
}

// A root, and modules under it, of which each does what its stretch says.
ModuleTree modules(const std::vector<std::vector<int>>& reads) {
  TreeBuilder builder;
  for (std::size_t i = 0; i < reads.size(); ++i) {
    Node& node = builder.tree[builder.add(0, std::to_string(i), 1)];
    node.stretches = {stretch(static_cast<int>(i), reads[i])};
    node.forward_us = 10;
    node.backward_us = 20;
  }
  return builder.tree;
}

Assignment on(const std::vector<int>& ranks) {
  Assignment owners{base::Partition(0)};
  for (const int rank : ranks) owners.emplace_back(rank);
  return owners;
}

Goal one_microbatch(int partitions, double latency_us) {
  Goal goal = over(partitions);
  goal.link.latency_us = latency_us;
  return goal;
}

double step(const ModuleTree& tree, const std::vector<int>& ranks, const Goal& goal) {
  return simulated_step_us(find_route(tree), on(ranks), goal);
}

std::vector<int> ranks_of(const PlannedWork& work) {
  std::vector<int> ranks;
  for (const auto& piece : work.workload.pieces) ranks.push_back(piece.work.rank);
  return ranks;
}

// Three experts of one value, and their sum.
TEST(PlannedWork, ComputesWhatReadsOneValueOnSeveralRanksAtOnce) {
  const ModuleTree tree = modules({{}, {0}, {0}, {0}, {1, 2, 3}});
  const Goal goal = one_microbatch(3, 1);
  // Forwards at once; a backward waits for each, one after the other, as their argument is the caller's.
  EXPECT_DOUBLE_EQ(step(tree, {0, 0, 1, 2, 0}, goal), (20 + 12 + 10) + (20 + 2 * 22 + 40));
  EXPECT_DOUBLE_EQ(step(tree, {0, 0, 0, 0, 0}, goal), 5 * 30);
}

TEST(PlannedWork, SendsAValueStraightToItsReadersPastThoseBetween) {
  const ModuleTree tree = modules({{}, {0}, {1}, {2, 0}});
  Goal goal = one_microbatch(3, 0);
  goal.link.bytes_per_us = 1;
  const auto work = work_of(find_route(tree), on({1, 2, 2, 1}), goal);
  EXPECT_EQ(work.loads[1].out_bytes, 2 * kBytes);  // to the second, and the result; nothing to itself
  EXPECT_EQ(work.loads[2].out_bytes, kBytes);
  EXPECT_EQ(work.loads[0].out_bytes, 0);
}

TEST(PlannedWork, CountsMessagesAsWorkOfBothRanks) {
  const ModuleTree tree = modules({{}, {0}});
  Goal goal = one_microbatch(2, 0);
  goal.link = {.latency_us = 0, .bytes_per_us = 4, .rank_us = 3};
  const auto work = work_of(find_route(tree), on({0, 1}), goal);
  for (const RankLoad& load : work.loads) EXPECT_DOUBLE_EQ(load.messages_us, 2 * (3 + 2));
  EXPECT_DOUBLE_EQ(work.loads[1].time_us(), 30 + 2 * 2 * (3 + 2));
}

TEST(PlannedWork, HasOnePieceOfCallsThatFollowEachOtherOnARank) {
  const ModuleTree tree = modules({{}, {0}, {1}, {2}, {3}, {4}});
  const auto work = work_of(find_route(tree), on({0, 1, 1, 1, 2, 2}), over(3));
  EXPECT_THAT(ranks_of(work), ElementsAre(0, 1, 2, 0));
  EXPECT_EQ(work.workload.pieces[1].work.forward, 3 * 10 * static_cast<std::int64_t>(kTicksPerMicrosecond));
}

// The second call on rank 1 reads what rank 2 makes meanwhile: the first one need not wait for it.
TEST(PlannedWork, HasTwoCallsWhereTheSecondWaitsForSomebodyElse) {
  const ModuleTree tree = modules({{}, {0}, {0}, {1, 2}});
  // The body's second piece stands between the two calls, for whose gradients it waits.
  EXPECT_THAT(ranks_of(work_of(find_route(tree), on({0, 2, 1, 1}), over(3))), ElementsAre(0, 2, 0, 1, 1, 0));
  EXPECT_DOUBLE_EQ(step(tree, {0, 2, 1, 1}, one_microbatch(3, 0)), (10 + 10 + 10) + (20 + 20 + 20 + 20));
}

// Two blocks x + inner(x), which begin with a call and do nothing before it.
TEST(PlannedWork, HasOnePieceOfBlocksThatBeginWithACallOfAnother) {
  TreeBuilder builder;
  builder.tree[builder.add(0, "first", 1)].stretches = {stretch(0, {})};
  int at = 1;
  for (const char* name : {"block1", "block2"}) {
    const int block = builder.add(0, name);
    const int inner = builder.add(block, "inner", 1);
    Stretch call;
    call.at = at;
    call.value_bytes = kBytes;
    call.reads.emplace();
    builder.tree[block].stretches = {call, stretch(at + 2, {at - 1, at + 1})};
    builder.tree[inner].stretches = {stretch(at + 1, {at - 1})};
    at += 3;
  }
  const Route route = find_route(builder.tree);
  ASSERT_EQ(route.results.size(), 1U);
  EXPECT_EQ(route.results[0].point, 6);
  const auto work = work_of(route, on({0, 1, 1, 1, 1}), over(2));
  EXPECT_THAT(ranks_of(work), ElementsAre(0, 1, 0));
  EXPECT_EQ(work.loads[1].out_bytes, kBytes);
}

// `outer` lies on rank 1 and calls a module on rank 2 with its argument.
TEST(PlannedWork, BringsArgumentsAndGradientsOfResultsToTheRankThatIsCalled) {
  TreeBuilder builder;
  const int first = builder.add(0, "first", 1);
  const int outer = builder.add(0, "outer", 1);
  const int inner = builder.add(outer, "inner", 1);
  builder.tree[first].stretches = {stretch(0, {})};
  builder.tree[outer].stretches = {stretch(1, {})};
  builder.tree[inner].stretches = {stretch(2, {0})};
  const Route route = find_route(builder.tree);
  ASSERT_EQ(route.calls.size(), 4U);
  Goal goal = over(3);
  const auto work = work_of(route, on({0, 1, 2}), goal);
  EXPECT_THAT(ranks_of(work), ElementsAre(0, 1, 2, 1, 0));  // its backward begins with a piece of its own
  EXPECT_EQ(work.loads[0].out_bytes, kBytes);
  EXPECT_EQ(work.loads[1].out_bytes, 2 * kBytes);  // the argument, and its own result, which nobody reads
  EXPECT_EQ(work.loads[2].out_bytes, kBytes);
}

TEST(PlannedWork, HasWeightPartsAsTheTraceSaysAndWholeBackwardsWhereNoGradientLeads) {
  ModuleTree tree = modules({{}, {0}, {1}, {2}});
  tree[3].stretches[0].weights_us = 5;
  const auto work = work_of(find_route(tree), on({0, 0, 1, 1}), over(2));
  const auto& pieces = work.workload.pieces;
  EXPECT_EQ(pieces[0].work.weights, pieces[0].work.backward);
  EXPECT_EQ(pieces[1].work.weights, static_cast<std::int64_t>(kTicksPerMicrosecond) * (5 + 9));  // 45 per cent
}

TEST(PlannedWork, WaitsForNoGradientsOfWhatIsNotTrained) {
  ModuleTree tree = modules({{}, {0}});
  tree[1].stretches[0].backward_us = 0;
  const Goal goal = one_microbatch(2, 100);
  EXPECT_DOUBLE_EQ(step(tree, {0, 1}, goal), 10 + 100 + 10 + 100 + 100 + 20 + 100);
  const auto work = work_of(find_route(tree), on({0, 1}), goal);
  EXPECT_EQ(work.workload.pieces[1].work.weights, work.workload.pieces[1].work.backward);
}

// A module that is called again is another call, with stretches of its own.
TEST(Route, HasACallForEachOfAModule) {
  TreeBuilder builder;
  const int block = builder.add(0, "block", 1);
  const int inner = builder.add(block, "inner", 1);
  builder.tree[0].stretches = {stretch(0, {})};
  builder.tree[block].stretches = {stretch(1, {0}), stretch(3, {2}), stretch(4, {3}), stretch(6, {5})};
  builder.tree[inner].stretches = {stretch(2, {1}), stretch(5, {4})};
  const Route route = find_route(builder.tree);
  std::vector<int> calls;
  for (const Point& point : route.points) calls.push_back(point.call);
  EXPECT_THAT(calls, ElementsAre(0, 1, 2, 1, 3, 4, 3));
  EXPECT_EQ(route.calls[4].caller, 3);
  ASSERT_EQ(route.results.size(), 1U);
  EXPECT_EQ(route.results[0].point, 6);
}

// Any tree of calls, any values from stretch to stretch, on any ranks.
RC_GTEST_PROP(PlannedWorkProperty, ComesToItsEndWhoeverOwnsWhat, ()) {
  TreeBuilder builder;
  const int size = *rc::gen::inRange(1, 12).as("modules");
  int at = 0;
  const auto work = [&](int node) {
    std::vector<int> reads;
    for (int more = *rc::gen::inRange(0, 3); at > 0 && more > 0; --more) reads.push_back(*rc::gen::inRange(0, at));
    builder.tree[node].stretches.push_back(stretch(at++, reads));
  };
  work(0);
  std::vector<int> open{0};
  for (int i = 0; i < size; ++i) {
    for (int up = *rc::gen::inRange(0, 3); up > 0 && open.size() > 1; --up) {
      open.pop_back();
      if (*rc::gen::arbitrary<bool>()) work(open.back());
    }
    open.push_back(builder.add(open.back(), std::to_string(i), 1));
    work(open.back());
  }
  Goal goal = one_microbatch(3, *rc::gen::inRange(0, 3));
  Assignment owners{base::Partition(0)};
  for (int i = 0; i < size; ++i) owners.emplace_back(*rc::gen::inRange(0, 3));
  auto planned = work_of(find_route(builder.tree), owners, goal);
  planned.workload.microbatches = *rc::gen::inRange(1, 4);
  const auto turns = schedule::simulate(*schedule::interleaved_schedule(2), planned.workload);
  RC_ASSERT(turns.size() == 2 * planned.workload.pieces.size() * planned.workload.microbatches);
  double work_us = 0;
  for (const RankLoad& load : planned.loads) work_us += load.forward_us + load.backward_us;
  RC_ASSERT(work_us == 30.0 * at);
}

}  // namespace
}  // namespace lamina::plan
