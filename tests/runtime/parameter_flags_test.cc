// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/parameter_flags.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "tests/pipeline/pipeline_fixture.h"

namespace lamina::runtime {
namespace {

using value::Value;

std::vector<at::Tensor> parameters() {
  std::vector<at::Tensor> made;
  for (int i = 0; i < 3; ++i) made.push_back(at::ones({2}).set_requires_grad(true));
  return made;
}

// Two ranks, and a module on the second one that multiplies by its rank's copy of parameter 0.
class Frozen : public testing::TestWithParam<const char*> {
 public:
  Frozen() : pipeline_(2, GetParam(), /*seed=*/1) {
    for (int rank = 0; rank < 2; ++rank) held_.push_back(parameters());
    scale_ = pipeline_.add("scale", 1, [this](pipeline::Job& job) {
      return [this, &job](Value arguments) -> Value { return arguments.as<at::Tensor>() * held_[job.rank().value][0]; };
    });
    for (int rank = 0; rank < 2; ++rank) pipeline_.job(rank).watch_flags({"a", "b", "c"}, held_[rank]);
  }

  // Runs `body(parameters, call, backward)` for each microbatch.
  using Call = std::function<at::Tensor(const at::Tensor&)>;
  void step(int microbatches, const std::function<void(std::vector<at::Tensor>&, const Call&)>& body) {
    pipeline::Job& job = pipeline_.job(0);
    const Call call = [&](const at::Tensor& x) { return job.call(scale_, x).as<at::Tensor>(); };
    const auto outcomes = pipeline_.step(microbatches, [&](base::Microbatch) -> Value {
      body(held_[0], call);
      return {};
    });
    for (const auto& outcome : outcomes) errors_.push_back(pipeline::message_of(outcome.error));
  }
  void backward(const at::Tensor& tensor) { pipeline_.job(0).backward({tensor.sum()}, {}, 1); }
  double gradient() const {
    const auto& found = held_[1][0].grad();
    return found.defined() ? found.sum().item<double>() : 0;
  }

  pipeline::Pipeline pipeline_;
  std::vector<std::vector<at::Tensor>> held_;
  base::ModuleId scale_;
  std::vector<std::string> errors_;
};
INSTANTIATE_TEST_SUITE_P(Schedules, Frozen, testing::Values("simple", "interleaved"));

TEST_P(Frozen, ABodyFreezesAParameterOfAnotherRankForItsNextCallsAlone) {
  for (int i = 0; i < 3; ++i) {
    step(4, [&](auto& parameters, const auto& call) {
      const auto x = at::ones({2}).set_requires_grad(true);
      parameters[0].set_requires_grad(false);
      const auto frozen = call(x);
      EXPECT_TRUE(frozen.requires_grad());
      EXPECT_FALSE(call(at::ones({2})).requires_grad());
      parameters[0].set_requires_grad(true);
      backward(frozen + call(x) * 0.5);
    });
    EXPECT_EQ(errors_, std::vector<std::string>(errors_.size()));
    // A leaf is asked when it accumulates: what was called while it was frozen has no graph of it.
    EXPECT_EQ(gradient(), 4.0 * (i + 1));
  }
}

TEST_P(Frozen, AfterTheStepEveryRankHasWhatTheLastMicrobatchLeft) {
  step(3, [&](auto& parameters, const auto& call) {
    parameters[0].set_requires_grad(false);
    parameters[2].set_requires_grad(false);
    call(at::ones({2}));
  });
  EXPECT_EQ(errors_, std::vector<std::string>(2));
  for (const auto& held : held_) {
    EXPECT_FALSE(held[0].requires_grad());
    EXPECT_TRUE(held[1].requires_grad());
    EXPECT_FALSE(held[2].requires_grad());
  }
}

TEST_P(Frozen, WhatIsFrozenWhenItsBackwardRunsAccumulatesNothing) {
  step(2, [&](auto& parameters, const auto& call) {
    const auto y = call(at::ones({2}));
    parameters[0].set_requires_grad(false);
    backward(y);
    parameters[0].set_requires_grad(true);
  });
  EXPECT_EQ(errors_, std::vector<std::string>(2));
  EXPECT_EQ(gradient(), 0);
}

TEST_P(Frozen, AStepThatFailsLeavesTheFlagsAsTheyWere) {
  step(1, [&](auto& parameters, const auto& call) {
    parameters[0].set_requires_grad(false);
    call(at::ones({2}));
    throw base::UsageError("on purpose");
  });
  for (const auto& error : errors_) EXPECT_NE(error.find("on purpose"), std::string::npos);
  for (const auto& held : held_) EXPECT_TRUE(held[0].requires_grad());
}

std::shared_ptr<const ParameterFlags::Watched> watched(std::vector<at::Tensor> tensors) {
  return std::make_shared<ParameterFlags::Watched>(std::vector<std::string>{"a", "b", "c"}, std::move(tensors));
}

TEST(ParameterFlags, WhatABodyLeavesTooLateForTheNextIsAnError) {
  auto held = parameters();
  ParameterFlags flags(watched(held));
  const base::Microbatch first(0), second(1);
  auto mine = flags.begin_body(first);
  flags.install(mine);
  EXPECT_FALSE(flags.keeps_others(first, mine = flags.read(mine)));
  flags.begin_body(second);
  held[1].set_requires_grad(false);
  mine = flags.read(mine);
  EXPECT_FALSE(flags.keeps_others(first, mine));
  try {
    flags.end_body(first, mine);
    FAIL();
  } catch (const base::UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("left b with another requires_grad"), std::string::npos);
  }
}

TEST(ParameterFlags, WhatTravelsIsChecked) {
  const ParameterFlags flags(watched(parameters()));
  const auto two = flags.from_bytes(ParameterFlags::to_bytes(
      std::make_shared<const std::map<std::int64_t, bool>>(std::map<std::int64_t, bool>{{0, true}, {2, false}})));
  EXPECT_EQ(flags.difference(two, nullptr), "c");
  EXPECT_EQ(flags.from_bytes(""), nullptr);
  EXPECT_THROW(flags.from_bytes(std::string(3, '\0')), base::FormatError);
  EXPECT_THROW(flags.from_bytes(std::string(4, '\x7f')), base::FormatError);
}

}  // namespace
}  // namespace lamina::runtime
