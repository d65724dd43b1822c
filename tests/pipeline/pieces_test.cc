// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/pieces.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

namespace lamina::pipeline {
namespace {

using Sizes = std::vector<std::int64_t>;

// Gives the pieces of a tensor of that size, one after the other.
Sizes lengths(const Pieces& pieces, std::int64_t size) {
  Sizes lengths;
  std::int64_t end = 0;
  for (int i = 0; i < pieces.microbatches(); ++i) {
    const auto [begin, length] = pieces.of(size, base::Microbatch(i));
    EXPECT_EQ(begin, end);
    end = begin + length;
    lengths.push_back(length);
  }
  EXPECT_EQ(end, size);
  return lengths;
}

TEST(Pieces, DifferByOneSampleAtMost) {
  for (const auto& [size, expected] : std::map<std::int64_t, Sizes>{
           {8, {2, 2, 2, 2}}, {7, {2, 2, 2, 1}}, {5, {2, 1, 1, 1}}, {3, {1, 1, 1}}, {0, {0, 0, 0, 0}}}) {
    const Pieces pieces(Sizes{size}, 4);
    EXPECT_EQ(lengths(pieces, size), expected);
    EXPECT_EQ(pieces.samples(), expected);
  }
}

TEST(Pieces, OfTensorsWithSeveralRowsForASampleLieSideBySide) {
  const Pieces pieces(Sizes{10, 5}, 4);
  EXPECT_EQ(lengths(pieces, 10), Sizes({4, 2, 2, 2}));
  EXPECT_EQ(lengths(pieces, 5), Sizes({2, 1, 1, 1}));
  EXPECT_EQ(pieces.samples(), Sizes({4, 2, 2, 2}));  // rows of the first
}

TEST(Pieces, OfOtherSizesHaveToDivide) {
  EXPECT_FALSE(Pieces(Sizes{12, 8}, 4).misfit());
  EXPECT_EQ(lengths(Pieces(Sizes{12, 8}, 4), 8), Sizes({2, 2, 2, 2}));
  const auto misfit = Pieces(Sizes{12, 10}, 4).misfit();
  ASSERT_TRUE(misfit);
  EXPECT_EQ(misfit->misfit, 1);
  EXPECT_EQ(misfit->beside, 0);
  EXPECT_EQ(Pieces(Sizes{7, 9}, 4).misfit()->misfit, 1);
  EXPECT_FALSE(Pieces(Sizes{12, 10}, 1).misfit());
}

TEST(Pieces, OfOneMicrobatchAreWhole) {
  const Pieces pieces(Sizes{12, 10}, 1);
  EXPECT_EQ(lengths(pieces, 10), Sizes({10}));
  EXPECT_EQ(pieces.samples(), Sizes({12}));
}

TEST(Pieces, OfFewerSamplesAreRepeatedWhereAllMicrobatchesAreNeeded) {
  const Pieces pieces(Sizes{2, 4}, 4, /*needs_all=*/true);
  EXPECT_EQ(pieces.microbatches(), 4);
  EXPECT_EQ(pieces.samples(), Sizes({1, 1, 0, 0}));
  for (const int last : {1, 2, 3}) EXPECT_EQ(pieces.of(4, base::Microbatch(last)).begin, 2);
  EXPECT_EQ(counted(pieces.samples(), 4), 2);
  EXPECT_EQ(counted(Sizes{0, 0}, 2), 2);
  EXPECT_EQ(counted({}, 4), 4);
}

TEST(Pieces, OfNothingAreNotKnown) {
  EXPECT_EQ(Pieces({}, 4).microbatches(), 4);
  EXPECT_TRUE(Pieces({}, 4).samples().empty());
}

// Numbers that are not rounded in the plain division are not rounded here either.
TEST(Share, OfEvenBatchesIsOneOverTheirNumber) {
  for (const int microbatches : {3, 7}) {
    const Sizes samples(microbatches, 5);
    EXPECT_EQ(share(samples, base::Microbatch(1), microbatches, {}, 1000), 1000.0 / microbatches);
    EXPECT_EQ(share(samples, base::Microbatch(1), microbatches, {3, 15 * microbatches}, 1), 1.0 / microbatches);
  }
}

}  // namespace
}  // namespace lamina::pipeline
