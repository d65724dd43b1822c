// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "lamina/plan/partition.h"
#include "tests/plan/trees.h"

namespace lamina::plan {
namespace {

using base::Partition;

TEST(Describe, IsATableOfPartitions) {
  const ModuleTree tree = gpt();
  EXPECT_EQ(describe(tree, step_planner()->assign(tree, over(2)), 2),
            "partition  modules  parameters    share  owns\n"
            "        0       25     1.7 MiB   52.9 %  model (itself), embedding, positions, dropout, blocks.0-1, head\n"
            "        1       21     1.5 MiB   47.1 %  blocks.2-3, norm\n");
}

TEST(Describe, ShowsAnEmptyPartition) {
  TreeBuilder builder;
  builder.add(0, "a", 100);
  EXPECT_EQ(describe(builder.tree, Assignment(2, Partition(0)), 2),
            "partition  modules  parameters    share  owns\n"
            "        0        2       100 B  100.0 %  model\n"
            "        1        0         0 B    0.0 %  (nothing)\n");
  EXPECT_EQ(assignments_line(builder.tree, Assignment(2, Partition(0)), 2),
            "Partition assignments: {0: [model], 1: []}");
}

TEST(Describe, JoinsOnlySiblingsInARow) {
  TreeBuilder builder;
  const int list = builder.add(0, "h", 0, false);
  for (int i = 8; i < 12; ++i) builder.add(list, std::to_string(i), 1);
  builder.add(0, "conv1", 1);
  builder.add(0, "conv2", 1);
  const Partition a(0);
  const Partition b(1);
  EXPECT_EQ(assignments_line(builder.tree, {b, b, a, b, a, a, a, a}, 2),
            "Partition assignments: {0: [h.8, h.10-11, conv1, conv2], 1: [model (itself), h.9]}");
}

}  // namespace
}  // namespace lamina::plan
