// SPDX-License-Identifier: Apache-2.0
// The backwards of a model in the steps of a pipeline of one rank.
#include "lamina/pipeline/backwards.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/pipeline/pipeline_fixture.h"

namespace lamina::pipeline {
namespace {

// A model of one weight.
class OneWeight {
 public:
  OneWeight() { pipeline.job(0).set_microbatches(2); }

  // A step of two microbatches of so many samples, each of which runs `body`; `copies`: all that there are.
  void step(const std::function<void()>& body, const std::vector<std::int64_t>& samples = {}, Copies copies = {}) {
    const auto run_body = [&](base::Microbatch) -> value::Value {
      body();
      return {};
    };
    const auto run = [this](const StepSpec& spec) { return pipeline.job(0).run_step_here(spec); };
    StepSpec spec{2, run_body, [] {}};
    spec.samples = samples;
    if (copies.count > 1) spec.tell_samples = [copies](std::int64_t) { return copies; };
    backwards.run_step(std::move(spec), [this] { return remote::Tensors{weight}; }, run);
  }
  void backward() { backwards.run({weight.sum()}, {}); }
  double gradient() const { return weight.grad()[0].item<double>(); }

  Pipeline pipeline{1, "simple"};
  Backwards backwards{pipeline.job(0), /*averages=*/true};
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

TEST(Backwards, CountAsMuchAsTheirSamplesAmongThoseOfAllCopies) {
  // The loss of a microbatch is its number.
  const auto gradient = [](const std::vector<std::int64_t>& samples, Copies copies) {
    OneWeight model;
    int number = 0;
    model.step([&] { model.backwards.run({(++number * model.weight).sum()}, {}); }, samples, copies);
    return model.gradient();
  };
  EXPECT_DOUBLE_EQ(gradient({}, {}), 1.5);
  EXPECT_DOUBLE_EQ(gradient({4, 4}, {}), 1.5);
  EXPECT_DOUBLE_EQ(gradient({2, 1}, {}), (2 * 1 + 1 * 2) / 3.0);
  EXPECT_DOUBLE_EQ(gradient({2, 1}, {2, 12}), 2 * (2 * 1 + 1 * 2) / 12.0);
  EXPECT_DOUBLE_EQ(gradient({2, 1}, {2, -1}), (2 * 1 + 1 * 2) / 3.0);  // a copy does not know its own
  EXPECT_DOUBLE_EQ(gradient({0, 0}, {2, 12}), 0);
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
