// SPDX-License-Identifier: Apache-2.0
#include "lamina/layout/common.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "lamina/layout/parameter_layout.h"
#include "tests/layout/pieces.h"

namespace lamina::layout {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

ParameterLayout columns(const Shape& shape, int degree, int shards = 1) {
  return {.name = "w", .shape = shape, .slicing = Slicing{1, {{shape[1]}}, degree}, .shards = shards};
}

ParameterLayout rows(const Shape& shape, int shards) { return {.name = "w", .shape = shape, .shards = shards}; }

TEST(Common, AContiguousBlockIsOneRun) {
  const Shape shape{6, 5};
  EXPECT_THAT(common(held(rows(shape, 3), 0, 1), whole(shape)), ElementsAre(layout::Run{0, 10, 10}));
  EXPECT_THAT(common(held(rows(shape, 3), 0, 1), held(rows(shape, 2), 0, 0)), ElementsAre(layout::Run{0, 10, 5}));
}

TEST(Common, AColumnSliceIsOneRunForEachRow) {
  EXPECT_THAT(common(held(columns({3, 4}, 2), 1, 0), whole({3, 4})),
              ElementsAre(layout::Run{0, 2, 2}, layout::Run{2, 6, 2}, layout::Run{4, 10, 2}));
}

TEST(Common, PiecesOfOneSliceMeetInOneRun) {
  EXPECT_THAT(common(held(columns({8, 4}, 2, 4), 1, 1), held(columns({8, 4}, 2, 2), 1, 0)),
              ElementsAre(layout::Run{0, 4, 4}));
}

TEST(Common, DifferentSlicesHaveNothingInCommon) {
  EXPECT_THAT(common(held(columns({8, 4}, 2), 0, 0), held(columns({8, 4}, 2), 1, 0)), IsEmpty());
}

TEST(Common, FusedQueriesKeysAndValuesAreOneRunForEachPartOfARow) {
  const ParameterLayout fused{
      .name = "c_attn", .shape = {4, 12}, .slicing = Slicing{1, {{4}, {4}, {4}}, 2}, .shards = 2};
  const Region region = held(fused, 0, 1);
  EXPECT_THAT(region.stripes, ElementsAre(Stripe{0, 0, 2}, Stripe{4, 2, 2}, Stripe{8, 4, 2}));
  EXPECT_EQ(region.begin, 12);
  EXPECT_EQ(region.end, 24);
  EXPECT_THAT(common(region, whole({4, 12})),
              ElementsAre(layout::Run{0, 24, 2}, layout::Run{2, 28, 2}, layout::Run{4, 32, 2}, layout::Run{6, 36, 2},
                          layout::Run{8, 40, 2}, layout::Run{10, 44, 2}));
}

TEST(Common, StripesThatMeetAcrossTheEndOfARowAreOneRun) {
  const ParameterLayout uneven{.name = "w", .shape = {3, 5}, .slicing = Slicing{1, {{4}, {1}}, 2}};
  EXPECT_THAT(common(whole({3, 5}), held(uneven, 0, 0)),
              ElementsAre(layout::Run{0, 0, 2}, layout::Run{4, 2, 3}, layout::Run{9, 5, 3}, layout::Run{14, 8, 1}));
}

TEST(Common, IteratesOverTheRunsAndThenHasNone) {
  CommonRuns runs(held(columns({2, 4}, 2), 0, 0), whole({2, 4}));
  EXPECT_EQ(runs.next(), (layout::Run{0, 0, 2}));
  EXPECT_EQ(runs.next(), (layout::Run{2, 4, 2}));
  EXPECT_EQ(runs.next(), std::nullopt);
  EXPECT_EQ(runs.next(), std::nullopt);
}

TEST(Common, ALargeMatrixCutAcrossHasOneRunForEachRowAndSlice) {
  const Shape shape{50'000, 12'288};
  std::int64_t runs = 0;
  std::int64_t elements = 0;
  for (const Piece& from : pieces(columns(shape, 8))) {
    for (const Piece& to : pieces(rows(shape, 6))) {
      CommonRuns all(from.region, to.region);
      while (const auto run = all.next()) {
        ++runs;
        elements += run->count;
      }
    }
  }
  EXPECT_EQ(elements, numel(shape));
  EXPECT_EQ(runs, 8 * 50'000 + 4);  // four of the five cuts between shards go through a slice's row
}

TEST(Common, TheLargestTensorOverflowsNothing) {
  const Shape shape{std::int64_t{1} << 30, std::int64_t{1} << 30};
  const Region last = held(rows(shape, 7), 0, 6);
  EXPECT_EQ(common(last, whole(shape)).front(), (layout::Run{0, last.begin, last.end - last.begin}));
  const Shape flat{kMostElements};
  const ParameterLayout halves{.name = "w", .shape = flat, .slicing = Slicing{0, {{kMostElements}}, 2}};
  EXPECT_THAT(common(held(halves, 1, 0), whole(flat)),
              ElementsAre(layout::Run{0, kMostElements / 2, kMostElements / 2}));
}

TEST(Common, OfTensorsOfDifferentShapesIsAnErrorThatShowsBoth) {
  try {
    common(whole({2, 3}), whole({3, 2}));
    FAIL();
  } catch (const base::InternalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("(2, 3) and (3, 2)"));
  }
}

}  // namespace
}  // namespace lamina::layout
