// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "lamina/plan/planner.h"
#include "tests/plan/trees.h"

namespace lamina::plan {
namespace {

using base::Partition;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(ManualPlanner, InnermostPlacementCountsThenTheFallback) {
  TreeBuilder builder;
  builder.add(0, "a", 1);
  const int list = builder.add(0, "list", 0, false);
  builder.add(list, "0", 1);
  const int placed = builder.add(list, "1", 1);
  builder.add(placed, "relu");
  builder.tree[list].placed_at = Partition(2);
  builder.tree[placed].placed_at = Partition(0);
  const Assignment expected{Partition(1), Partition(1), Partition(2), Partition(2), Partition(0), Partition(0)};
  EXPECT_EQ(manual_planner(Partition(1))->assign(builder.tree, over(3)), expected);
}

std::string error_of(const ModuleTree& tree, Partition fallback, int partitions) {
  try {
    manual_planner(fallback)->assign(tree, over(partitions));
  } catch (const base::ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(ManualPlanner, NamesAllThatIsWrongAtOnce) {
  TreeBuilder builder;
  const int embedding = builder.add(0, "embedding", 1);
  const int block = builder.add(0, "block", 1);
  const int head = builder.add_sharing(0, "head", embedding);
  builder.tree[block].placed_at = Partition(2);
  builder.tree[head].placed_at = Partition(1);
  const std::string error = error_of(builder.tree, Partition(0), 2);
  EXPECT_THAT(error, AllOf(HasSubstr("2 errors"), HasSubstr("\"block\" is in partition 2"), HasSubstr("0 to 1"),
                           HasSubstr("\"embedding\" and \"head\" share a parameter"), HasSubstr("place both")));
  EXPECT_THAT(error_of(builder.tree, Partition(5), 6), AllOf(HasSubstr("1 error"), Not(HasSubstr("\"block\""))));
}

TEST(ManualPlanner, TheFallbackIsAPartitionToo) {
  EXPECT_THAT(error_of({Node{}}, Partition(2), 2), HasSubstr("default partition"));
  EXPECT_EQ(error_of({Node{}}, Partition(1), 2), "no error");
}

}  // namespace
}  // namespace lamina::plan
