// SPDX-License-Identifier: Apache-2.0
// The backwards of a model in the steps of a pipeline of one rank.
#include "lamina/pipeline/backwards.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/pipeline/pipeline_fixture.h"
#include "tests/usage_error.h"

namespace lamina::pipeline {
namespace {

// A model of one weight.
class OneWeight {
 public:
  // A step of two microbatches, each of which runs `body`.
  void step(const std::function<void()>& body, const std::string& uneven = "") {
    const auto run_body = [&](base::Microbatch) -> value::Value {
      body();
      return {};
    };
    const auto run = [this](const StepSpec& spec) { return pipeline.job(0).run_step_here(spec); };
    backwards.run_step({2, run_body, [] {}}, uneven, [this] { return remote::Tensors{weight}; }, run);
  }
  void backward() { backwards.run({weight.sum()}, {}); }
  double gradient() const { return weight.grad()[0].item<double>(); }

  Pipeline pipeline{1, "simple"};
  Backwards backwards{pipeline.job(0), 2};
  at::Tensor weight = at::ones({3}, at::kDouble).set_requires_grad(true);
};

TEST(Backwards, InAStepDivideGradientsByTheNumberOfMicrobatches) {
  OneWeight model;
  model.step([&] { model.backward(); });
  EXPECT_EQ(model.gradient(), 1);
  model.backward();
  EXPECT_EQ(model.gradient(), 2);
}

TEST(Backwards, AddUpWhereSomebodyElseAveragesThem) {
  OneWeight model;
  model.backwards.add_up();
  model.step([&] { model.backward(); });
  EXPECT_EQ(model.gradient(), 2);
}

TEST(Backwards, AreAnErrorInAStepOfFewerMicrobatchesWhoeverRunsThem) {
  OneWeight model;
  const auto own = usage_error_of([&] { model.step([&] { model.backward(); }, "the batch is uneven"); });
  const auto torchs =
      usage_error_of([&] { model.step([&] { model.weight.sum().backward(); }, "the batch is uneven"); });
  for (const auto& error : {own, torchs}) EXPECT_EQ(error, "the batch is uneven [step-uneven]");
}

TEST(Backwards, AreNotTheGradientsThatABodyTakesAway) {
  OneWeight model;
  model.backward();
  model.step([&] { model.weight.mutable_grad().reset(); }, "the batch is uneven");
  EXPECT_FALSE(model.weight.grad().defined());
}

TEST(Backwards, ThatAreTorchsAreToldOfOnce) {
  OneWeight model;
  const auto said = [&] {
    testing::internal::CaptureStderr();
    model.step([&] { model.weight.sum().backward(); });
    return testing::internal::GetCapturedStderr().find("loss.backward()") != std::string::npos;
  };
  EXPECT_TRUE(said());
  EXPECT_FALSE(said());
}

}  // namespace
}  // namespace lamina::pipeline
