// SPDX-License-Identifier: Apache-2.0
// The traffic of a step, in bytes of tensors per pair of ranks.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "tests/pipeline/pipeline_fixture.h"

namespace lamina::pipeline {
namespace {

using Bytes = std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t>;  // by ranks: from, to

constexpr std::int64_t kWidth = 128;
constexpr std::int64_t kActivation = kWidth * sizeof(double);  // of a microbatch, and its gradient
constexpr std::int64_t kOutput = sizeof(double);               // the loss of a microbatch
constexpr int kMicrobatches = 4;

at::Tensor tensor_of(const value::Value& tree) { return tree.as<at::Tensor>(); }

// A chain of stages, one per rank; the loss is computed on rank 0.
class Chain {
 public:
  Chain(int ranks, const std::string& schedule, std::uint64_t seed) : pipeline_(ranks, schedule, seed) {
    for (int i = 0; i < ranks; ++i) {
      const auto weight = at::full({1}, 2.0, at::kDouble).set_requires_grad(true);
      const auto make = [weight](Job&) {
        return [weight](value::Value x) { return value::Value(tensor_of(x) * weight); };
      };
      stages_.push_back(pipeline_.add("stage" + std::to_string(i), i, make));
    }
  }

  // The traffic of one more step.
  Bytes step(bool train) {
    pipeline_.traffic().clear();
    const auto body = [&](base::Microbatch) {
      const c10::AutoGradMode mode(train);
      value::Value x = at::ones({kWidth}, at::kDouble);
      for (const auto stage : stages_) x = pipeline_.job(0).call(stage, std::move(x));
      const auto loss = tensor_of(x).square().sum();  // whose gradient has an element for each of x
      if (train) pipeline_.job(0).backward({loss}, {}, 1.0);
      return value::Value(loss.detach());
    };
    for (const auto& outcome : pipeline_.step(kMicrobatches, body)) EXPECT_EQ(message_of(outcome.error), "");
    return pipeline_.traffic().bytes();
  }

 private:
  Pipeline pipeline_;
  std::vector<base::ModuleId> stages_;
};

// Each activation goes from its producer to its consumer, rank 0 being the last stage's, and each gradient back; the
// outputs of the step go to every other rank.
Bytes closed_form(int ranks, bool train) {
  Bytes bytes;
  for (int rank = 0; rank < ranks; ++rank) {
    const int next = (rank + 1) % ranks;
    bytes[{rank, next}] += kMicrobatches * kActivation;
    if (train) bytes[{next, rank}] += kMicrobatches * kActivation;
  }
  for (int rank = 1; rank < ranks; ++rank) bytes[{0, rank}] += kMicrobatches * kOutput;
  return bytes;
}

class AnyChain : public ::testing::TestWithParam<std::tuple<int, std::string, bool>> {};

TEST_P(AnyChain, AfterTheFirstStepsEachActivationAndGradientCrossesOnceFromProducerToConsumer) {
  const auto& [ranks, schedule, train] = GetParam();
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    Chain chain(ranks, schedule, seed);
    for (int i = 0; i < 3; ++i) chain.step(train);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(chain.step(train), closed_form(ranks, train)) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Chains, AnyChain,
                         ::testing::Combine(::testing::Values(2, 3, 4),
                                            ::testing::Values("simple", "interleaved", "zero_bubble"),
                                            ::testing::Bool()),
                         [](const auto& info) {
                           return std::get<1>(info.param) + "_" + std::to_string(std::get<0>(info.param)) +
                                  (std::get<2>(info.param) ? "_training" : "_evaluation");
                         });

}  // namespace
}  // namespace lamina::pipeline
