// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/usage_error.h"

namespace lamina {
namespace {

template <class... T>
frontend::Batch batch_of(int count, const T&... held) {
  frontend::Said said;
  return frontend::split({frontend::argument_of(held)...}, {count}, said).first;
}

template <class T>
auto part(const T& held, int microbatch, int count) {
  const auto batch = batch_of(count, held);
  return frontend::part_of(held, {batch, base::Microbatch(microbatch), 0});
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
  EXPECT_TRUE(part(whole(x), 1, 2).is_same(x));
  EXPECT_TRUE(part(along(1, x), 1, 2).equal(x.narrow(1, 2, 2)));
}

TEST(Split, AListOfSamplesIsCutByElementsWhereverItStands) {
  const std::vector<at::Tensor> pictures{at::full({4, 4}, 0.0), at::full({4, 5}, 1.0), at::full({4, 6}, 2.0)};
  const auto rows = at::arange(3);
  const auto batch = batch_of(2, pictures, rows);
  EXPECT_EQ(frontend::part_of(pictures, {batch, base::Microbatch(0), 0}).size(), 2);
  const auto second = frontend::part_of(pictures, {batch, base::Microbatch(1), 0});
  ASSERT_EQ(second.size(), 1);
  EXPECT_TRUE(second[0].equal(pictures[2]));
  const auto inside = part(std::tuple(pictures, rows), 1, 2);
  ASSERT_EQ(std::get<0>(inside).size(), 1);
  EXPECT_EQ(std::get<1>(inside).item<std::int64_t>(), 2);
}

TEST(Split, ATupleHasAllItemsOfItsTypeAndIsNotCutByElements) {
  const auto batch = batch_of(2, std::tuple(at::ones({3, 4}), at::ones({5, 4})), at::arange(2));
  ASSERT_TRUE(batch.refused);
  EXPECT_NE(std::string(batch.refused->what()).find("argument 0 is cut"), std::string::npos) << batch.refused->what();
}

TEST(Split, APieceIsAViewWhoseWritesTheOthersDoNotSee) {
  const auto x = at::full({4}, 1.0);
  const auto first = part(x, 0, 2);
  const auto version = part(x, 1, 2)._version();
  first.add_(1);
  EXPECT_EQ(x[0].item<double>(), 2.0);
  EXPECT_EQ(part(x, 1, 2)._version(), version);
}

TEST(Split, ATensorThatCannotBeSplitIsAnErrorOfTheStepThatSaysWhichAndWhatToDo) {
  const auto axis = batch_of(2, along(2, at::arange(4)));
  ASSERT_TRUE(axis.refused);
  EXPECT_NE(std::string(axis.refused->what()).find("argument 0 of shape [4] has no axis 2"), std::string::npos);
  EXPECT_EQ(axis.pieces.microbatches(), 2);
}

TEST(Split, WhatIsToldOfABatchIsToldOnce) {
  frontend::Said said;
  const auto x = at::zeros({8, 3});
  const auto told = [&](const at::Tensor& rows, const std::vector<std::string>& names) {
    return frontend::split({frontend::argument_of(rows), frontend::argument_of(names)}, {4}, said).second;
  };
  const std::vector<std::string> lines{
      "split into 4 microbatches: argument 0 of shape [8, 3] along axis 0, argument 1 with 8 samples by elements. To "
      "keep an argument whole: lamina::whole(argument); another axis: lamina::along(1, argument)"};
  EXPECT_EQ(told(x, std::vector<std::string>(8, "name")), lines);
  EXPECT_TRUE(told(x, std::vector<std::string>(8, "name")).empty());
  EXPECT_EQ(told(x.narrow(0, 0, 2), std::vector<std::string>(2, "name")).size(), 1);  // fewer
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
