// SPDX-License-Identifier: Apache-2.0
#include "lamina/layout/parameter_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "lamina/base/error.h"
#include "tests/layout/any_layout.h"

namespace lamina::layout {
namespace {

using base::ConfigError;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

void expect_not_possible(const ParameterLayout& layout, const std::string& words) {
  try {
    pieces(layout);
    ADD_FAILURE() << "no error says " << words;
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("the layout of " + layout.name + " is not possible"));
    EXPECT_THAT(error.what(), HasSubstr(words));
  }
}

ParameterLayout sliced(const Shape& shape, const Slicing& slicing) {
  return {.name = "h.0.weight", .shape = shape, .slicing = slicing};
}

TEST(ParameterLayout, ShardsAreOfOneSizeAndTheLastArePadded) {
  const ParameterLayout layout{.name = "w", .shape = {3, 5}, .shards = 2};
  EXPECT_EQ(held(layout, 0, 0).size, 8);
  EXPECT_THAT(elements_of(held(layout, 0, 1)), ElementsAre(8, 9, 10, 11, 12, 13, 14, kPadding));
}

TEST(ParameterLayout, WithMoreShardsThanElementsTheLastHoldPaddingAlone) {
  const ParameterLayout layout{.name = "w", .shape = {2}, .shards = 4};
  EXPECT_THAT(elements_of(held(layout, 0, 1)), ElementsAre(1));
  EXPECT_THAT(elements_of(held(layout, 0, 3)), ElementsAre(kPadding));
}

TEST(ParameterLayout, AScalarIsOneElementOfTheFirstShard) {
  const ParameterLayout layout{.name = "scale", .shape = {}, .shards = 2};
  EXPECT_THAT(elements_of(held(layout, 0, 0)), ElementsAre(0));
  EXPECT_THAT(elements_of(held(layout, 0, 1)), ElementsAre(kPadding));
}

TEST(ParameterLayout, AnEmptyTensorHasEmptyPieces) {
  const ParameterLayout layout{.name = "w", .shape = {0, 5}, .slicing = Slicing{1, {{5}}, 2}, .shards = 3};
  for (const Piece& piece : pieces(layout)) {
    EXPECT_EQ(piece.region.size, 0);
    EXPECT_THAT(elements_of(piece.region), IsEmpty());
  }
}

TEST(ParameterLayout, AVocabularyIsSlicedUnevenlyOrPadded) {
  Slicing slicing{0, {{1009}}, 4};
  EXPECT_EQ(held(sliced({1009, 8}, slicing), 0, 0).size, 253 * 8);
  EXPECT_EQ(held(sliced({1009, 8}, slicing), 3, 0).size, 250 * 8);
  slicing.padded = true;
  EXPECT_EQ(held(sliced({1009, 8}, slicing), 3, 0).size, 253 * 8);
  slicing.sections[0].unit = 128;
  EXPECT_EQ(held(sliced({1009, 8}, slicing), 3, 0).size, 256 * 8);
}

TEST(ParameterLayout, AHeadIsNeverTorn) {
  const ParameterLayout layout = sliced({6}, {.dim = 0, .sections = {{6, 2}}, .degree = 2});
  EXPECT_THAT(elements_of(held(layout, 0, 0)), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(elements_of(held(layout, 1, 0)), ElementsAre(4, 5));
}

TEST(ParameterLayout, PaddingInsideTheRowsOfASliceIsNobodysElement) {
  const ParameterLayout layout = sliced({2, 3}, {.dim = 1, .sections = {{3}}, .degree = 2, .padded = true});
  EXPECT_THAT(elements_of(held(layout, 1, 0)), ElementsAre(2, kPadding, 5, kPadding));
}

TEST(ParameterLayout, ASliceBeyondTheLastElementHoldsPaddingAlone) {
  const ParameterLayout layout = sliced({3}, {.dim = 0, .sections = {{3}}, .degree = 5, .padded = true});
  EXPECT_THAT(elements_of(held(layout, 2, 0)), ElementsAre(2));
  EXPECT_THAT(elements_of(held(layout, 4, 0)), ElementsAre(kPadding));
  EXPECT_EQ(held(layout, 4, 0).end, 0);
}

TEST(ParameterLayout, SlicingIntoOneIsNoSlicing) {
  const Shape shape{4, 6};
  EXPECT_EQ(held(sliced(shape, {.dim = 1, .sections = {{2}, {4}}}), 0, 0), whole(shape));
}

TEST(ShareOf, EachMemberHasAsManyAndTheLastOnesWhatIsLeft) {
  EXPECT_EQ(share_of(7, 3, 0), (Share{0, 3, 3}));
  EXPECT_EQ(share_of(7, 3, 2), (Share{6, 7, 3}));
  EXPECT_EQ(share_of(2, 4, 3), (Share{2, 2, 1}));
  EXPECT_EQ(share_of(0, 2, 1), (Share{0, 0, 0}));
  EXPECT_EQ(share_of(5, 1, 0), (Share{0, 5, 5}));
}

TEST(ParameterLayout, SizesThatDoNotFitAreErrorsThatSayWhich) {
  expect_not_possible({.name = "w", .shape = {3, -1}}, "a dimension of size -1");
  expect_not_possible({.name = "w", .shape = {kHuge, 3}}, "more than 2^60 elements");
  expect_not_possible({.name = "w", .shape = {kHuge, kHuge, 0}}, "more than 2^60 elements");
  expect_not_possible({.name = "w", .shape = {3}, .shards = 0}, "sharding into 0");
  expect_not_possible({.name = "w", .shape = {3}, .partition = base::Partition(-1)}, "partition -1");
}

TEST(ParameterLayout, SlicingsThatDoNotFitAreErrorsThatSayWhy) {
  expect_not_possible(sliced({4}, {.dim = 0, .sections = {{4}}, .degree = 0}), "slicing into 0");
  expect_not_possible(sliced({4}, {.dim = 1, .sections = {{4}}, .degree = 2}), "slicing along dimension 1 of 1");
  expect_not_possible(sliced({4}, {.dim = -1, .sections = {{4}}, .degree = 2}), "slicing along dimension -1 of 1");
  expect_not_possible(sliced({}, {.dim = 0, .sections = {{1}}, .degree = 2}), "slicing along dimension 0 of 0");
  expect_not_possible(sliced({4}, {.dim = 0, .sections = {{3}}, .degree = 2}), "sections that leave 1 of the 4");
  expect_not_possible(sliced({4}, {.dim = 0, .sections = {{3}, {2}}}), "sections of more than the 4");
  expect_not_possible(sliced({4}, {.dim = 0, .sections = {{kHuge}, {kHuge}}}), "sections of more than the 4");
  expect_not_possible(sliced({4}, {.dim = 0, .sections = {{-4}, {8}}}), "a section of -4");
  expect_not_possible(sliced({4}, {.dim = 0, .sections = {{4, 0}}}), "in units of 0");
  expect_not_possible(sliced({4}, {.dim = 0, .sections = {{4, kHuge}}, .degree = 2}), "in units of");
  expect_not_possible(sliced({4, 4}, {.dim = 0, .sections = {{4, std::int64_t{1} << 58}}, .degree = 2, .padded = true}),
                      "with padding, more than 2^60");
}

TEST(ParameterLayout, AllThatIsWrongIsSaidAtOnce) {
  const ParameterLayout layout{.name = "w", .shape = {-3}, .shards = 0};
  expect_not_possible(layout, "size -3");
  expect_not_possible(layout, "sharding into 0");
}

TEST(ParameterLayout, APieceThatThereIsNotIsAnError) {
  const ParameterLayout layout{.name = "w", .shape = {4}, .slicing = Slicing{0, {{4}}, 2}, .shards = 3};
  EXPECT_THROW(held(layout, 2, 0), base::InternalError);
  EXPECT_THROW(held(layout, -1, 0), base::InternalError);
  EXPECT_THROW(held(layout, 0, 3), base::InternalError);
  EXPECT_THROW(held(layout, 0, -1), base::InternalError);
}

TEST(DType, HasTheNameAndTheSizeOfTorchs) {
  EXPECT_EQ(traits(DType::kBool).name, "bool");
  EXPECT_EQ(traits(DType::kFloat8E5M2).name, "float8_e5m2");
  EXPECT_EQ(traits(DType::kBFloat16).size_bytes, 2);
  EXPECT_EQ(traits(DType::kFloat32).name, "float32");
  EXPECT_EQ(traits(DType::kComplex128).size_bytes, 16);
}

}  // namespace
}  // namespace lamina::layout
