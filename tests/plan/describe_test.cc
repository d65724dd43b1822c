// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "lamina/plan/report.h"
#include "tests/plan/trees.h"

namespace lamina::plan {
namespace {

using base::Partition;

// The first half of the blocks, and what is not in them, on partition 0.
Assignment halves(const ModuleTree& tree) {
  Assignment owners;
  for (const Node& node : tree) {
    const bool second = node.name.starts_with("blocks.2") || node.name.starts_with("blocks.3") || node.name == "norm";
    owners.emplace_back(second ? 1 : 0);
  }
  return owners;
}

TEST(Describe, IsATableOfPartitions) {
  const ModuleTree tree = gpt();
  EXPECT_EQ(describe(tree, report(tree, halves(tree), over(2))),
            "partition  modules  parameters   share   memory  sends  owns\n"
            "        0       25     1.7 MiB  52.9 %  3.4 MiB    0 B  model (itself), embedding, positions, dropout, "
            "blocks.0-1, head\n"
            "        1       21     1.5 MiB  47.1 %  3.0 MiB    0 B  blocks.2-3, norm\n"
            "bubble, with bytes in place of times, 50.0 %\n");
}

TEST(Describe, ShowsTimesWhereTheyAreKnown) {
  TreeBuilder builder;
  for (const char* name : {"a", "b"}) {
    Node& node = builder.tree[builder.add(0, name, 100)];
    node.forward_us = 1000;
    node.backward_us = 2000;
    node.activation_bytes = 10;
    node.output_bytes = 5;
  }
  Goal goal = over(2);
  goal.microbatches = 3;
  EXPECT_EQ(describe(builder.tree, report(builder.tree, {Partition(0), Partition(0), Partition(1)}, goal)),
            "partition  modules  parameters   share    time  memory  sends  owns\n"
            "        0        2       100 B  50.0 %  3.0 ms   230 B    5 B  model (itself), a\n"
            "        1        1       100 B  50.0 %  3.0 ms   220 B    5 B  b\n"
            "predicted step 12.0 ms, bubble 25.0 %\n");
}

TEST(Describe, ShowsAnEmptyPartitionAndWarnsOfWhatCannotBeCut) {
  TreeBuilder builder;
  builder.add(0, "a", 100);
  const Assignment owners(2, Partition(0));
  EXPECT_EQ(
      describe(builder.tree, report(builder.tree, owners, over(2))),
      "partition  modules  parameters    share  memory  sends  owns\n"
      "        0        2       100 B  100.0 %   200 B    0 B  model\n"
      "        1        0         0 B    0.0 %     0 B    0 B  (nothing)\n"
      "bubble, with bytes in place of times, 50.0 %\n"
      "warning: partition 0 takes 2.0 times the mean: \"a\" takes 2.0 times the mean and cannot be cut; use fewer "
      "partitions, or make several modules of it\n");
  EXPECT_EQ(assignments_line(builder.tree, owners, 2), "Partition assignments: {0: [model], 1: []}");
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
