// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/prediction.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "lamina/plan/planner.h"
#include "tests/plan/any_tree.h"
#include "tests/plan/trees.h"

namespace lamina::plan {
namespace {

// Plans of leaves of 50 to 150 us.
RC_GTEST_PROP(Prediction, OfAPlanIsWithinAHalfOfTheSimulatedSchedule, ()) {
  ModuleTree tree(1);
  Goal goal = any_goal();
  goal.active_microbatches.reset();
  const int size = *rc::gen::inRange(1, 30).as("leaves");
  for (int at = 0; at < size; ++at) {
    const double forward = 50 + *rc::gen::inRange(0, 100);
    tree.push_back({.parent = 0, .parameter_bytes = 1, .parameter_ids = {at}, .forward_us = forward});
    tree.back().backward_us = 2 * forward;
  }
  const Assignment owners = step_planner()->assign(tree, goal);
  const Route route = find_route(tree);
  const double predicted = step_us(predict(route, owners, goal).shape, goal);
  const double simulated = simulated_step_us(route, owners, goal);
  RC_ASSERT(simulated <= 1.5 * predicted);
  RC_ASSERT(predicted <= 1.5 * simulated);
}

// By chance a mean may be some thousandths below, with few turns a bit more.
RC_GTEST_PROP(Prediction, OfALeastStepIsHardlyLongerThanTheMeanOfSimulatedOnes, ()) {
  const ModuleTree tree = any_tree({});
  Goal goal = any_goal();
  if (*rc::gen::arbitrary<bool>()) goal.schedule = "zero_bubble";
  Assignment owners{base::Partition(0)};
  while (owners.size() < tree.size()) owners.emplace_back(*rc::gen::inRange(0, goal.partitions));
  const Route route = find_route(tree);
  const PlannedWork work = work_of(route, owners, goal);
  RC_ASSERT(least_step_us(work, goal) * 0.99 <= simulated_step_us(route, owners, goal));
  RC_ASSERT(least_step_us(work, goal) * 0.95 <= mean_step_us(work, goal));
}

TEST(Prediction, OfALeastStepHasWhatComesBeforeAndAfterAllOfARank) {
  TreeBuilder builder;
  for (const char* name : {"a", "b"}) {
    Node& node = builder.tree[builder.add(0, name, 1)];
    node.forward_us = name[0] == 'a' ? 10 : 15;
    node.backward_us = 2 * node.forward_us;
  }
  Goal goal = over(2);
  goal.microbatches = 3;
  goal.link.latency_us = 1;
  const Assignment owners{base::Partition(0), base::Partition(0), base::Partition(1)};
  const PlannedWork work = work_of(find_route(builder.tree), owners, goal);
  EXPECT_DOUBLE_EQ(least_step_us(work, goal), (10 + 1) + 3 * 45 + (1 + 20));
  goal.active_microbatches = 1;
  EXPECT_DOUBLE_EQ(least_step_us(work, goal), 3 * (75 + 4));
}

Goal even(const char* schedule, int partitions, int microbatches) {
  Goal goal = over(partitions);
  goal.schedule = schedule;
  goal.microbatches = microbatches;
  return goal;
}

TEST(Prediction, OfEvenStagesIsTheIdeal) {
  TreeBuilder builder;
  Assignment owners{base::Partition(0)};
  for (int i = 0; i < 4; ++i) {
    Node& node = builder.tree[builder.add(0, std::to_string(i), 1)];
    node.forward_us = 10;
    node.backward_us = 20;
    owners.emplace_back(i);
  }
  const Route route = find_route(builder.tree);
  for (const char* schedule : {"simple", "interleaved"}) {
    const Goal goal = even(schedule, 4, 8);
    EXPECT_DOUBLE_EQ(step_us(predict(route, owners, goal).shape, goal), (8 + 4 - 1) * 30);
  }
}

TEST(Prediction, OfWhatIsHeldIsKnownForAnyNumberOfMicrobatches) {
  TreeBuilder builder;
  Assignment owners{base::Partition(0)};
  for (int i = 0; i < 3; ++i) {
    builder.tree[builder.add(0, std::to_string(i), 1)].forward_us = 10;
    owners.emplace_back(i);
  }
  const Route route = find_route(builder.tree);
  const auto held = [&](const char* schedule, int microbatches) {
    return simulated_held(route, owners, even(schedule, 3, microbatches));
  };
  constexpr int kVeryMany = 1'000'000'000;
  EXPECT_EQ(held("interleaved", kVeryMany), held("interleaved", 100));
  EXPECT_EQ(held("simple", kVeryMany), std::vector<int>(3, kVeryMany));
}

TEST(Prediction, OfWhatIsHeldIsAllWithSimpleAndLessTheLaterTheStageWithInterleaved) {
  TreeBuilder builder;
  Assignment owners{base::Partition(0)};
  for (int i = 0; i < 3; ++i) {
    Node& node = builder.tree[builder.add(0, std::to_string(i), 100)];
    node.forward_us = 10;
    node.backward_us = 20;
    node.activation_bytes = 5;
    owners.emplace_back(i);
  }
  const Route route = find_route(builder.tree);
  EXPECT_EQ(simulated_held(route, owners, even("simple", 3, 8)), (std::vector<int>{8, 8, 8}));
  const Goal interleaved = even("interleaved", 3, 8);
  const auto held = simulated_held(route, owners, interleaved);
  EXPECT_EQ(held[0], interleaved.held());
  EXPECT_GT(held[0], held[1]);
  EXPECT_GT(held[1], held[2]);
  EXPECT_EQ(memory_bytes(builder.tree, owners, held)[2], 2 * 100 + 5 * held[2]);
}

TEST(Prediction, OfZeroBubbleIsShorterAndHoldsAsMuchAsInterleaved) {
  TreeBuilder builder;
  Assignment owners{base::Partition(0)};
  for (int i = 0; i < 4; ++i) {
    Node& node = builder.tree[builder.add(0, std::to_string(i), 100)];
    node.forward_us = 10;
    node.backward_us = 20;
    owners.emplace_back(i);
  }
  const Route route = find_route(builder.tree);
  const auto step = [&](const char* schedule) { return simulated_step_us(route, owners, even(schedule, 4, 8)); };
  EXPECT_DOUBLE_EQ(step("interleaved"), 11 * 30);
  EXPECT_LE(step("zero_bubble"), 0.83 * 11 * 30);
  const auto held = [&](const char* schedule) { return simulated_held(route, owners, even(schedule, 4, 8)); };
  for (int i = 0; i < 4; ++i) EXPECT_LE(held("zero_bubble")[i], held("interleaved")[0]);
}

TEST(Prediction, OfTheScheduleTakesAGradientThroughTheModuleThatReturnedItsTensor) {
  TreeBuilder builder;
  const int pair = builder.add(0, "pair");
  for (const int node : {builder.add(pair, "first", 1), builder.add(pair, "second", 1), builder.add(0, "third", 1)}) {
    builder.tree[node].forward_us = 10;
    builder.tree[node].backward_us = 20;
  }
  Goal goal = even("interleaved", 2, 1);
  goal.link.latency_us = 3;
  const Route route = find_route(builder.tree);
  const auto step = [&](int of_pair, int first, int second) {
    return simulated_step_us(
        route, {base::Partition(0), base::Partition(of_pair), base::Partition(first), base::Partition(second), {}},
        goal);
  };
  EXPECT_DOUBLE_EQ(step(1, 1, 1), 90 + 4 * 3);
  EXPECT_DOUBLE_EQ(step(1, 1, 0), 90 + (2 + 4) * 3);  // back to `pair`, then to `second`
  EXPECT_DOUBLE_EQ(step(0, 1, 0), 90 + (2 + 2) * 3);  // `pair` is where its second module is
}

TEST(Prediction, CountsTheMessagesOfTheFirstMicrobatch) {
  TreeBuilder builder;
  for (const char* name : {"a", "b"}) {
    Node& node = builder.tree[builder.add(0, name, 1)];
    node.forward_us = 10;
    node.output_bytes = 100;
  }
  Goal goal = even("interleaved", 2, 1);
  goal.link = {1, 50};
  const Assignment owners{base::Partition(0), base::Partition(0), base::Partition(1)};
  // Two messages of 100 bytes, there and back, forward and backward.
  EXPECT_DOUBLE_EQ(step_us(predict(find_route(builder.tree), owners, goal).shape, goal), 20 + 4 * 3);
}

}  // namespace
}  // namespace lamina::plan
