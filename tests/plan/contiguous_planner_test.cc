// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "lamina/plan/partition.h"
#include "tests/plan/trees.h"

namespace lamina::plan {
namespace {

std::vector<int> owners(const ModuleTree& tree, int partitions) {
  std::vector<int> result;
  for (base::Partition owner : contiguous_planner()->assign(tree, over(partitions))) {
    result.push_back(static_cast<int>(owner.value));
  }
  return result;
}

std::string line(const ModuleTree& tree, int partitions) {
  return assignments_line(tree, contiguous_planner()->assign(tree, over(partitions)), partitions);
}

TEST(ContiguousPlanner, CutsAGptBetweenBlocksWhereThatIsBalanced) {
  EXPECT_EQ(line(gpt(), 1), "Partition assignments: {0: [model]}");
  EXPECT_EQ(line(gpt(), 2),
            "Partition assignments: {0: [model (itself), embedding, positions, dropout, blocks.0-1, head], "
            "1: [blocks.2-3, norm]}");
  EXPECT_EQ(line(gpt(), 4),
            "Partition assignments: {0: [model (itself), embedding, positions, dropout, blocks.0, head], "
            "1: [blocks.1], 2: [blocks.2], 3: [blocks.3, norm]}");
}

TEST(ContiguousPlanner, CutsABlockOpenWhereWholeBlocksAreUnbalanced) {
  EXPECT_EQ(line(gpt(), 3),
            "Partition assignments: {0: [model (itself), embedding, positions, dropout, blocks.0, blocks.1 (itself), "
            "blocks.1.norm1, blocks.1.attention, blocks.1.norm2, head], 1: [blocks.1.mlp, blocks.2], "
            "2: [blocks.3, norm]}");
}

TEST(ContiguousPlanner, SeesThroughWrappers) {
  TreeBuilder builder;
  const int inner = builder.add(builder.add(builder.add(0, "module"), "model"), "layers", 0, false);
  for (int i = 0; i < 4; ++i) builder.add(inner, std::to_string(i), 100);
  EXPECT_EQ(owners(builder.tree, 2), (std::vector{0, 0, 0, 0, 0, 0, 1, 1}));
}

TEST(ContiguousPlanner, LeavesPartitionsEmptyWhenModulesAreFew) {
  TreeBuilder builder;
  builder.add(0, "a", 10);
  builder.add(0, "b", 1);
  EXPECT_EQ(owners(builder.tree, 4), (std::vector{0, 0, 1}));
  EXPECT_EQ(owners({Node{}}, 4), (std::vector{0}));
  EXPECT_TRUE(owners({}, 4).empty());
}

TEST(ContiguousPlanner, KeepsAnExpandedModulesOwnParametersWithItsFirstChild) {
  TreeBuilder builder;
  builder.add(0, "a", 100);
  const int wide = builder.add(0, "wide", 20);
  builder.add(wide, "b", 80);
  builder.add(wide, "c", 100);
  EXPECT_EQ(owners(builder.tree, 3), (std::vector{0, 0, 1, 1, 2}));
}

TEST(ContiguousPlanner, OwnsAModuleWithoutParametersWhereItIsCalled) {
  TreeBuilder builder;
  builder.add(0, "a", 100);
  const int block = builder.add(0, "block");
  builder.add(block, "linear", 100);
  builder.add(block, "activation");
  builder.add(0, "dropout");
  EXPECT_EQ(owners(builder.tree, 2), (std::vector{0, 0, 1, 1, 1, 0}));
}

TEST(ContiguousPlanner, OwnsAListOfParametersWithTheModuleThatReadsThem) {
  TreeBuilder builder;
  builder.add(0, "a", 100);
  const int block = builder.add(0, "block");
  builder.add(block, "scales", 100, false);
  EXPECT_EQ(owners(builder.tree, 2), (std::vector{0, 0, 1, 1}));
}

TEST(ContiguousPlanner, CountsATiedHeadWithTheEmbedding) {
  TreeBuilder builder;
  const int embedding = builder.add(0, "embedding", 100);
  builder.add(0, "a", 50);
  builder.add(0, "b", 50);
  const int head = builder.add_sharing(0, "head", embedding);
  EXPECT_EQ(owners(builder.tree, 2), (std::vector{0, 0, 1, 1, 0}));

  // Its bias moves with it.
  builder.tree[head].parameter_bytes += 100;
  builder.tree[head].parameter_ids.push_back(99);
  EXPECT_EQ(owners(builder.tree, 3), (std::vector{0, 0, 1, 2, 0}));
}

TEST(ContiguousPlanner, FollowsChainsOfSharing) {
  TreeBuilder builder;
  const int a = builder.add(0, "a", 10);
  const int b = builder.add(0, "b", 10);
  const int c = builder.add(0, "c", 10);
  builder.tree[b].parameter_ids = {7, 8};
  builder.tree[c].parameter_ids = {8};
  builder.tree[a].parameter_ids = {7};
  builder.add(0, "d", 20);
  EXPECT_EQ(owners(builder.tree, 2), (std::vector{0, 0, 0, 0, 1}));
}

TEST(ContiguousPlanner, RepeatsOfABlockAreWhereTheBlockIs) {
  TreeBuilder builder;
  builder.add(0, "a", 100);
  const int linear = builder.add(builder.add(0, "first"), "linear", 100);
  const int repeat = builder.add(0, "repeat");
  builder.add_sharing(repeat, "linear", linear);
  builder.add(repeat, "activation");
  EXPECT_EQ(owners(builder.tree, 2), (std::vector{0, 0, 1, 1, 1, 1, 1}));
}

TEST(ContiguousPlanner, ASharingModuleMovesWithoutItsChildren) {
  TreeBuilder builder;
  const int a = builder.add(0, "a", 100);
  const int wide = builder.add_sharing(0, "wide", a);
  builder.add(wide, "child", 100);
  EXPECT_EQ(owners(builder.tree, 2), (std::vector{0, 0, 0, 1}));
}

}  // namespace
}  // namespace lamina::plan
