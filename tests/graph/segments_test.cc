// SPDX-License-Identifier: Apache-2.0
#include "lamina/graph/segments.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "lamina/graph/program.h"
#include "tests/graph/pretended_ranks.h"

namespace lamina::graph {
namespace {

using base::Partition;

Placed at(int partition, std::vector<int> inputs) {
  Placed placed{Partition(partition), {}, {}, {true}};
  for (const int input : inputs) placed.inputs.push_back({input, 0});
  return placed;
}

TEST(Segments, AGraphThatComesBackHasThreeOfThem) {
  const auto made = cut({at(0, {}), at(1, {0}), at(0, {1, 0})}, {{2, 0}}, 2);
  ASSERT_EQ(made.segments.size(), 5);  // and what is outside, on each
  EXPECT_EQ(made.segments[2].partition, Partition(0));
  EXPECT_EQ(made.segments[2].level, 2);
  ASSERT_EQ(made.crossings.size(), 3);
  EXPECT_TRUE(made.crossings[0].gradient);
  EXPECT_EQ(made.crossings[2].reader, made.outside(Partition(1)));
  EXPECT_FALSE(made.crossings[2].gradient);
}

TEST(Segments, WhatOneSegmentAloneReadsIsInIt) {
  // A mask that partition 1 makes of the input, and reads after what comes from partition 0.
  const auto made = cut({at(0, {}), at(1, {}), at(1, {0, 1})}, {{2, 0}}, 2);
  EXPECT_EQ(made.segment_of[1], made.segment_of[2]);
  const auto program = program_of(made, {{2, 0}}, Partition(1), {base::Rank(0), base::Rank(1)}, {"a", "b", "c"});
  EXPECT_EQ(program.outside(), 1);
  EXPECT_EQ(program.phase(Direction::kForward, 0), schedule::Phase::kForward);
  EXPECT_EQ(program.phase(Direction::kBackward, 0), schedule::Phase::kBackwardStart);
  EXPECT_TRUE(program.keeps_slot_over_loss());
}

TEST(Segments, AValueThatTwoSegmentsReadIsSentOnce) {
  // Partition 1 reads operation 0 at level 1 and at level 3.
  const auto made = cut({at(0, {}), at(1, {0}), at(0, {1}), at(1, {2, 0})}, {{3, 0}}, 2);
  int sent = 0;
  for (const auto& crossing : made.crossings) sent += crossing.value.operation == 0 ? 1 : 0;
  EXPECT_EQ(sent, 1);
  EXPECT_EQ(made.crossings[0].reader, made.segment_of[1]);
}

TEST(Segments, NoTwoWaitForEachOther) {
  for (int seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 draw(seed);
    const auto graph = testing::NumberGraph::random(draw, 40, 1 + seed % 5);
    const auto made = cut(graph.operations, graph.results, graph.partitions);
    for (int i = 0; i < static_cast<int>(graph.operations.size()); ++i) {
      for (const OperationOutput& input : graph.operations[i].inputs) {
        const auto& maker = made.segments[made.segment_of[input.operation]];
        const auto& reader = made.segments[made.segment_of[i]];
        if (maker.partition == reader.partition) {
          ASSERT_LE(maker.level, reader.level) << seed;
        } else {
          ASSERT_LT(maker.level, reader.level) << seed;
        }
      }
    }
  }
}

}  // namespace
}  // namespace lamina::graph
