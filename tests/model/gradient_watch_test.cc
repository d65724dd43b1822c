// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/gradient_watch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace lamina::model {
namespace {

at::Tensor parameter(at::ScalarType type = at::kDouble) { return at::ones({2}, type).set_requires_grad(true); }
void backward(const at::Tensor& parameter) { parameter.sum().backward(); }

// One parameter, and how often a gradient of it was heard of.
struct OneWatched {
  at::Tensor weight = parameter();
  int heard = 0;
  GradientWatch watch{[this](const at::Tensor& each) {
    EXPECT_TRUE(each.is_same(weight) && each.grad().defined());
    ++heard;
  }};

  bool look() { return watch.watch(std::vector{weight}); }
};

TEST(GradientWatch, AGradientIsHeardOfOnceHoweverOftenTheParameterWasSaid) {
  OneWatched one;
  for (int i = 1; i <= 3; ++i) {
    EXPECT_FALSE(one.look());
    backward(one.weight);
    EXPECT_EQ(one.heard, i);
  }
}

TEST(GradientWatch, AParameterMayGetValuesOfAnotherTypeOrShape) {
  for (const auto& value : {at::ones({2}, at::kFloat), at::ones({5}, at::kDouble)}) {
    OneWatched one;
    one.look();
    backward(one.weight);
    one.weight.mutable_grad().reset();
    one.weight.set_data(value);
    EXPECT_FALSE(one.look());
    backward(one.weight);
    EXPECT_EQ(one.heard, 2);
    EXPECT_EQ(one.weight.grad().sizes(), value.sizes());
  }
}

TEST(GradientWatch, ThereAndBackIsAnotherNodeToo) {
  OneWatched one;
  one.look();
  for (const auto type : {at::kFloat, at::kDouble}) one.weight.set_data(one.weight.detach().to(type));
  one.look();
  backward(one.weight);
  EXPECT_EQ(one.heard, 1);
}

TEST(GradientWatch, OneThatIsFrozenMayBeTrainedLater) {
  OneWatched one;
  one.weight.set_requires_grad(false);
  one.look();
  EXPECT_FALSE(one.weight.requires_grad());
  one.weight.set_requires_grad(true);
  backward(one.weight);
  EXPECT_EQ(one.heard, 1);
}

TEST(GradientWatch, AnotherParameterMayTakeItsPlace) {
  OneWatched one;
  one.look();
  const auto before = std::exchange(one.weight, parameter());
  EXPECT_FALSE(one.look());
  backward(before);
  EXPECT_EQ(one.heard, 0);
  backward(one.weight);
  EXPECT_EQ(one.heard, 1);
}

TEST(GradientWatch, AGradientThatNobodyWatchedIsTold) {
  OneWatched one;
  one.look();
  one.weight = parameter();
  backward(one.weight);
  EXPECT_EQ(one.heard, 0);
  EXPECT_TRUE(one.look());
  EXPECT_FALSE(one.look());
}

TEST(GradientWatch, AGraphThatGoesOnToUseTheNodeOfBeforeIsHeardOfOnce) {
  OneWatched one;
  one.look();
  const auto loss = one.weight.sum();
  one.weight.set_data(at::ones({2}, at::kFloat));
  one.look();
  backward(one.weight);
  EXPECT_EQ(one.heard, 1);
}

}  // namespace
}  // namespace lamina::model
