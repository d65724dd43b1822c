// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/ordered_gradients.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace lamina::runtime {
namespace {

using base::Microbatch;

at::Tensor parameter() { return at::zeros({1}).set_requires_grad(true); }

void accumulate(const at::Tensor& parameter, float gradient) {
  auto& grad = parameter.mutable_grad();
  const auto part = at::full({1}, gradient);
  grad = grad.defined() ? grad + part : part;
}

// In float32, 1 + 1e8 - 1e8 is 0 and 1e8 - 1e8 + 1 is 1.
TEST(OrderedGradients, AreAddedInTheOrderOfTheMicrobatchesAfterThoseThatWereThere) {
  const auto weight = parameter();
  accumulate(weight, 1e8F);
  OrderedGradients gradients;
  gradients.begin({weight});
  gradients.turn_of(Microbatch(1));
  accumulate(weight, 1);
  gradients.turn_of(Microbatch(0));
  EXPECT_FALSE(weight.grad().defined());
  accumulate(weight, -1e8F);
  gradients.end(true);
  EXPECT_EQ(weight.grad().item<float>(), 1);
}

TEST(OrderedGradients, AMicrobatchGoesOnWithWhatItHas) {
  const auto weight = parameter(), unused = parameter();
  OrderedGradients gradients;
  gradients.begin({weight, unused});
  for (int turn = 0; turn < 3; ++turn) {
    for (int i = 0; i < 2; ++i) {
      gradients.turn_of(Microbatch(i));
      accumulate(weight, 1);
      EXPECT_EQ(weight.grad().item<float>(), turn + 1);
    }
  }
  gradients.end(true);
  EXPECT_EQ(weight.grad().item<float>(), 6);
  EXPECT_FALSE(unused.grad().defined());
}

// 1 + 1e8 - 1e8 as above, whichever part of the microbatch comes first.
TEST(OrderedGradients, WeightPartsAreAddedAfterAllElseOfTheirMicrobatch) {
  for (const bool weights_first : {false, true}) {
    const auto weight = parameter();
    accumulate(weight, 1e8F);
    OrderedGradients gradients;
    gradients.begin({weight});
    gradients.turn_of(Microbatch(1));
    accumulate(weight, 1);
    for (const bool in_weights : {weights_first, !weights_first}) {
      gradients.turn_of(Microbatch(0), in_weights);
      EXPECT_FALSE(weight.grad().defined());
      accumulate(weight, in_weights ? 1 : -1e8F);
    }
    gradients.end(true);
    EXPECT_EQ(weight.grad().item<float>(), 2);
  }
}

TEST(OrderedGradients, BeginAgainInTheTurnInWhichTheParametersBecomeKnown) {
  const auto weight = parameter();
  accumulate(weight, 3);
  OrderedGradients gradients;
  gradients.begin({});
  gradients.turn_of(Microbatch(0));
  gradients.begin({weight});
  for (int i = 0; i < 2; ++i) {
    gradients.turn_of(Microbatch(i));
    EXPECT_FALSE(weight.grad().defined());
    accumulate(weight, 1);
  }
  gradients.end(true);
  EXPECT_EQ(weight.grad().item<float>(), 5);
}

TEST(OrderedGradients, AFailedStepLeavesThoseThatWereThere) {
  const auto weight = parameter();
  accumulate(weight, 3);
  OrderedGradients gradients;
  gradients.begin({weight});
  gradients.turn_of(Microbatch(0));
  accumulate(weight, 5);
  gradients.end(false);
  EXPECT_EQ(weight.grad().item<float>(), 3);
}

TEST(OrderedGradients, OneThatIsDifferentiatedKeepsItsHistory) {
  const auto weight = parameter(), factor = parameter();
  OrderedGradients gradients;
  gradients.begin({weight});
  for (int i = 0; i < 2; ++i) {
    gradients.turn_of(Microbatch(i));
    weight.mutable_grad() = factor * (i + 1);
  }
  gradients.end(true);
  weight.grad().sum().backward();
  EXPECT_EQ(factor.grad().item<float>(), 3);
}

}  // namespace
}  // namespace lamina::runtime
