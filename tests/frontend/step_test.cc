// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/usage_error.h"

namespace lamina {
namespace {

template <class T>
T part(const T& held, int microbatch, int count) {
  const pipeline::Pieces pieces(std::vector<std::int64_t>{4}, count);
  return frontend::part_of(held, {pieces, base::Microbatch(microbatch), 1});
}

TEST(Split, EachMicrobatchGetsItsPieceOfEveryTensorInAnArgument) {
  const auto x = at::arange(12).view({4, 3});
  EXPECT_TRUE(part(x, 1, 2).equal(x.narrow(0, 2, 2)));
  const std::map<std::string, std::vector<at::Tensor>> nested{{"a", {x, x + 1}}};
  EXPECT_TRUE(part(nested, 3, 4).at("a").at(1).equal(x.narrow(0, 3, 1) + 1));
}

TEST(Split, NumbersAndScalarsGoToAllAndTypesThatCannotTravelGoAsTheyAre) {
  EXPECT_EQ(part(5, 1, 2), 5);
  EXPECT_EQ(part(at::full({}, 3.0), 1, 2).item<double>(), 3.0);
  const int* pointer = nullptr;
  EXPECT_EQ(part(pointer, 1, 2), nullptr);
}

TEST(Split, WholeAndAlongSayOtherwise) {
  const auto x = at::arange(12).view({3, 4});
  const pipeline::Pieces pieces(std::vector<std::int64_t>{4}, 2);
  EXPECT_TRUE(frontend::part_of(whole(x), {pieces, base::Microbatch(1), 0}).is_same(x));
  EXPECT_TRUE(frontend::part_of(along(1, x), {pieces, base::Microbatch(1), 0}).equal(x.narrow(1, 2, 2)));
}

TEST(Split, AListOfSamplesIsCutByElements) {
  const pipeline::Pieces pieces(std::vector<std::int64_t>{3}, 2);
  const std::vector<at::Tensor> pictures{at::full({3, 4}, 0.0), at::full({3, 5}, 1.0), at::full({3, 6}, 2.0)};
  const auto first = frontend::part_of(pictures, {pieces, base::Microbatch(0), 0, true});
  const auto second = frontend::part_of(pictures, {pieces, base::Microbatch(1), 0, true});
  ASSERT_EQ(first.size(), 2);
  ASSERT_EQ(second.size(), 1);
  EXPECT_TRUE(second[0].equal(pictures[2]));
}

TEST(Split, APieceIsAViewWhoseWritesTheOthersDoNotSee) {
  const auto x = at::full({4}, 1.0);
  const auto first = part(x, 0, 2);
  const auto version = part(x, 1, 2)._version();
  first.add_(1);
  EXPECT_EQ(x[0].item<double>(), 2.0);
  EXPECT_EQ(part(x, 1, 2)._version(), version);
}

TEST(Split, ATensorThatCannotBeSplitIsAnErrorThatSaysWhichAndWhatToDo) {
  const pipeline::Pieces pieces(std::vector<std::int64_t>{4}, 2);
  const auto axis =
      usage_error_of([&] { frontend::part_of(along(2, at::arange(4)), {pieces, base::Microbatch(0), 0}); });
  EXPECT_NE(axis.find("no axis 2"), std::string::npos) << axis;
}

TEST(Split, AlongSaysThatAnArgumentIsToBeSplit) {
  const auto x = at::arange(4);
  EXPECT_FALSE(frontend::argument_of(x).is_said);
  EXPECT_TRUE(frontend::argument_of(along(0, x)).is_said);
}

TEST(Merge, MeansCountSamples) {
  const StepOutput uneven{{at::full({}, 3.0), at::full({}, 6.0)}, {2, 1}};
  EXPECT_EQ(uneven.reduce_mean().item<double>(), 4.0);
  const StepOutput rows{{at::ones({2}), at::ones({1})}, {2, 1}};
  EXPECT_EQ(rows.concat().sizes(), at::IntArrayRef({3}));
  EXPECT_NE(usage_error_of([&] { rows.reduce_mean(); }).find("[step-outputs-differ]"), std::string::npos);
}

TEST(Merge, TensorsBecomeStepOutputsInTheirPlaces) {
  using Result = std::tuple<at::Tensor, int, std::map<std::string, at::Tensor>>;
  const std::vector<Result> results{{at::full({2}, 1.0), 5, {{"x", at::full({}, 2.0)}}},
                                    {at::full({2}, 3.0), 6, {{"x", at::full({}, 4.0)}}}};
  const auto [tensors, numbers, named] = merge(results);
  EXPECT_TRUE(tensors.reduce_mean().equal(at::full({2}, 2.0)));
  EXPECT_EQ(tensors.concat().sizes(), at::IntArrayRef({4}));
  EXPECT_EQ(tensors.stack().sizes(), at::IntArrayRef({2, 2}));
  EXPECT_EQ(numbers, (std::vector{5, 6}));
  EXPECT_EQ(named.at("x").reduce_sum().item<double>(), 6.0);
}

TEST(Merge, TheMeanOfIntegersIsInTheDefaultDtype) {
  EXPECT_EQ((StepOutput{{at::full({}, 1, at::kLong), at::full({}, 2, at::kLong)}}.reduce_mean().item<double>()), 1.5);
}

}  // namespace
}  // namespace lamina
