// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "lamina/plan/planner.h"
#include "lamina/plan/report.h"
#include "tests/plan/trees.h"

namespace lamina::plan {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string line(const ModuleTree& tree, const Goal& goal) {
  return assignments_line(tree, step_planner()->assign(tree, goal), goal.partitions);
}

TEST(StepPlanner, CutsAGptBetweenBlocksWhereThatIsBalanced) {
  EXPECT_EQ(line(gpt(), over(1)), "Partition assignments: {0: [model]}");
  EXPECT_EQ(line(gpt(), over(2)),
            "Partition assignments: {0: [model (itself), embedding, positions, dropout, blocks.0-1, head], "
            "1: [blocks.2-3, norm]}");
}

TEST(StepPlanner, CutsWhereTheMessageIsSmallWhenMessagesTakeTime) {
  TreeBuilder builder;
  for (int i = 0; i < 6; ++i) {
    Node& node = builder.tree[builder.add(0, std::to_string(i), 100)];
    node.forward_us = 100;
    node.output_bytes = i == 3 ? 1 : 1000;
  }
  Goal goal = over(2);
  goal.microbatches = 2;
  goal.memory_weight = 0;
  goal.link = {0, 1};
  builder.tree.back().output_bytes = 1;
  EXPECT_EQ(line(builder.tree, goal), "Partition assignments: {0: [model (itself), 0-3], 1: [4-5]}");
}

TEST(StepPlanner, WeighsMemoryAgainstTime) {
  TreeBuilder builder;
  const auto add = [&](const char* name, std::int64_t bytes, double forward_us) {
    builder.tree[builder.add(0, name, bytes)].forward_us = forward_us;
  };
  add("table", 900, 1);
  add("a", 100, 100);
  add("b", 100, 100);
  Goal goal = over(2);
  goal.microbatches = 16;
  goal.memory_weight = 0;
  EXPECT_EQ(line(builder.tree, goal), "Partition assignments: {0: [model (itself), table, a], 1: [b]}");
  goal.memory_weight = 1;
  EXPECT_EQ(line(builder.tree, goal), "Partition assignments: {0: [model (itself), table], 1: [a, b]}");
}

TEST(StepPlanner, MovesNothingThatIsPlacedByHandAndBalancesTheRest) {
  TreeBuilder builder;
  for (int i = 0; i < 4; ++i) builder.add(0, std::to_string(i), 100);
  builder.tree[1].placed_at = base::Partition(1);
  const Assignment owners = step_planner()->assign(builder.tree, over(2));
  EXPECT_EQ(owners[1], base::Partition(1));
  EXPECT_EQ(std::ranges::count(owners.begin() + 1, owners.end(), base::Partition(0)), 2);
}

TEST(StepPlanner, SaysHowMuchMemoryIsMissingWhereAndWhichModuleIsTheLargest) {
  TreeBuilder builder;
  builder.add(0, "small", 100);
  builder.add(0, "large", 1000);
  Goal goal = over(2);
  goal.memory_limit_bytes = 1500;
  try {
    step_planner()->assign(builder.tree, goal);
    FAIL() << "a plan that does not fit";
  } catch (const base::ConfigError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("1500 bytes per rank"), HasSubstr("500 bytes (500 B) are missing"),
                                    HasSubstr("partition 1"), HasSubstr("\"large\" with 2000 bytes")));
  }
}

TEST(StepPlanner, LeavesPartitionsEmptyWhenModulesAreFew) {
  TreeBuilder builder;
  builder.add(0, "a", 10);
  builder.add(0, "b", 1);
  EXPECT_EQ(line(builder.tree, over(4)), "Partition assignments: {0: [model (itself), a], 1: [b], 2: [], 3: []}");
  EXPECT_EQ(line({Node{}}, over(2)), "Partition assignments: {0: [model], 1: []}");
  EXPECT_TRUE(step_planner()->assign({}, over(2)).empty());
}

}  // namespace
}  // namespace lamina::plan
