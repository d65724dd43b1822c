// SPDX-License-Identifier: Apache-2.0
#include "lamina/verification/call_gradients.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

namespace {

using lamina::verification::CallGradients;
using Names = std::set<std::string>;
using Tensors = std::vector<at::Tensor>;

// A model of two parameters, which a step calls.
struct CallGradientsTest : testing::Test {
  at::Tensor first = at::ones({3}).requires_grad_(), second = at::ones({3}).requires_grad_();
  std::vector<CallGradients::Named> parameters = {{"first", first}, {"second", second}};

  static void run_backward(CallGradients& gradients, const at::Tensor& loss) {
    gradients.see_backward(Tensors{loss});
    torch::autograd::backward({loss}, {}, /*retain_graph=*/true);
  }
};

TEST_F(CallGradientsTest, WhatTheStepGivesAnOutputIsKeptOverItsBackwards) {
  CallGradients gradients(parameters, {});
  const auto output = first * second;
  gradients.see_outputs(Tensors{output});
  run_backward(gradients, (2 * output).sum());
  run_backward(gradients, (3 * output).sum());
  const auto found = gradients.gradients({});
  ASSERT_TRUE(found);
  ASSERT_TRUE(found->contains(0));
  EXPECT_TRUE(found->at(0).equal(at::full({3}, 5.0)));
  EXPECT_EQ(gradients.used_beside(), Names());
}

TEST_F(CallGradientsTest, AnOutputThatNoBackwardReachesHasNone) {
  CallGradients gradients(parameters, {});
  const auto used = first * 2, unused = second * 2;
  gradients.see_outputs(Tensors{used, unused});
  run_backward(gradients, used.sum());
  const auto found = gradients.gradients({});
  ASSERT_TRUE(found);
  EXPECT_TRUE(found->contains(0));
  EXPECT_FALSE(found->contains(1));
}

TEST_F(CallGradientsTest, WhatTheModelMadeOfItsOwnResultCannotBeToldFromWhatTheStepMade) {
  CallGradients gradients(parameters, {});
  const auto result = first * 2, made = result * second;
  gradients.see_outputs(Tensors{result, made});
  run_backward(gradients, (result + made).sum());
  EXPECT_FALSE(gradients.gradients({}));
}

TEST_F(CallGradientsTest, GradientsThatTheCallItselfKnowsAreTaken) {
  CallGradients gradients(parameters, {});
  const auto result = first * 2, made = result * second;
  gradients.see_outputs(Tensors{result, made});
  run_backward(gradients, (result + made).sum());
  const auto known = at::full({3}, 7.0);
  const auto found = gradients.gradients(Tensors{known, known});
  ASSERT_TRUE(found);
  EXPECT_TRUE(found->at(0).is_same(known));
  EXPECT_TRUE(found->at(1).is_same(known));
}

TEST_F(CallGradientsTest, AParameterThatALossReachesOutsideOfTheCallIsUsedBeside) {
  CallGradients gradients(parameters, {});
  const auto output = first * second;
  gradients.see_outputs(Tensors{output});
  run_backward(gradients, output.sum() + second.square().sum());
  EXPECT_EQ(gradients.used_beside(), Names{"second"});
}

TEST_F(CallGradientsTest, AParameterBehindWhatTheCallIsGivenIsUsedBeside) {
  const CallGradients gradients(parameters, Tensors{first * 2});
  EXPECT_EQ(gradients.used_beside(), Names{"first"});
}

TEST_F(CallGradientsTest, AParameterThatTheCallReturnsIsUsedBeside) {
  CallGradients gradients(parameters, {});
  gradients.see_outputs(Tensors{first * 2, second});
  EXPECT_EQ(gradients.used_beside(), Names{"second"});
}

}  // namespace
