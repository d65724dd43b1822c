// SPDX-License-Identifier: Apache-2.0
// BatchNorm's running statistics on a device are those of the host, which waits for nothing.
#include "lamina/runtime/running_statistics.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <optional>

#include "lamina/base/error.h"
#include "lamina/runtime/batch_norm.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/schedule/schedule.h"
#include "tests/emulated/emulated.h"

namespace lamina::runtime {
namespace {

constexpr int kMicrobatches = 4, kChannels = 3;

std::vector<at::Tensor> inputs_on(at::Device device) {
  std::vector<at::Tensor> inputs;
  for (int i = 0; i < kMicrobatches; ++i) {
    const auto wave = at::arange(4 * kChannels, at::kFloat).view({4, kChannels});
    inputs.push_back((at::sin(wave * (1.3 + i)) * (2 + i)).to(device));
  }
  return inputs;
}

// A BatchNorm that trains and counts its calls, one that trains and does not, and one that evaluates.
class Norms {
 public:
  Norms(at::Device device, std::optional<double> momentum) : inputs_(inputs_on(device)) {
    for (int i = 0; i < 3; ++i) {
      const auto options = at::TensorOptions(at::kFloat).device(device);
      modules_.push_back({"norm", at::zeros(kChannels, options), at::ones(kChannels, options),
                          at::zeros({}, options.dtype(at::kLong)), momentum});
    }
  }

  // Microbatches come in an order of their own; some call twice, and in one of the second step the first is made anew.
  void step() {
    RunningStatistics statistics;
    statistics.begin(modules_);
    for (const int microbatch : {2, 0, 3, 1}) {
      statistics.turn_of(base::Microbatch(microbatch));
      std::int64_t counted = counted_;
      if (counted_ > 0 && microbatch == 2) {
        for (const auto& buffer : {modules_[0].mean, modules_[0].var, modules_[0].count}) buffer.zero_();
        counted = 0;
      }
      for (int call = 0; call <= microbatch % 2; ++call) train(0, microbatch, ++counted);
      train(1, microbatch, 1);
      evaluate(2, microbatch);
    }
    statistics.end(/*keep=*/true);
    counted_ += kMicrobatches + 2;
  }

  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> all;
    for (const auto& each : modules_) all.insert(all.end(), {each.mean.cpu(), each.var.cpu(), each.count.cpu()});
    return all;
  }

 private:
  void train(std::size_t number, int microbatch, std::int64_t counted) {
    const at::NoGradGuard no_grad;
    const auto& [name, mean, var, count, momentum] = modules_[number];
    if (number == 0) count.add_(1);
    const auto factor = momentum.value_or(1. / static_cast<double>(counted));
    at::batch_norm(inputs_[static_cast<std::size_t>(microbatch)], {}, {}, mean, var, true, factor, 1e-5, false);
  }

  void evaluate(std::size_t number, int microbatch) {
    const auto& [name, mean, var, count, momentum] = modules_[number];
    at::batch_norm(inputs_[static_cast<std::size_t>(microbatch)], {}, {}, mean, var, false, 0.1, 1e-5, false);
  }

  const std::vector<at::Tensor> inputs_;
  std::vector<BatchNorm> modules_;
  std::int64_t counted_ = 0;
};

TEST(RunningStatisticsOfADevice, AreThoseOfTheHostWithoutAWait) {
  for (const auto momentum : {std::optional(0.3), std::optional<double>()}) {
    Norms here(at::kCPU, momentum), there(at::Device(at::kPrivateUse1, 0), momentum);
    for (int step = 0; step < 2; ++step) {
      here.step();
      emulated::reset_counts();
      there.step();
      const auto counts = emulated::counts();
      EXPECT_EQ(counts.waits, 0) << "step " << step;
    }
    const auto expected = here.values(), found = there.values();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-6, 1e-6)) << i << ": " << found[i] << " for " << expected[i];
    }
  }
}

TEST(RunningStatisticsOfADevice, ThatAnInferenceWouldMissAreAnError) {
  const auto options = at::TensorOptions(at::kFloat).device(at::Device(at::kPrivateUse1, 0));
  const BatchNorm norm{"norm", at::zeros(kChannels, options), at::ones(kChannels, options),
                       at::zeros({}, options.dtype(at::kLong)), 0.1};
  note_inferences(norm.mean.device());
  WorkerPool pool({});
  StepContext step(pool,
                   {.microbatches = 2, .turns = schedule::TeamTurns::alone(schedule::make_schedule("interleaved", 2))});
  step.statistics.begin({norm});
  const auto call = [&](int microbatch, bool trains) {
    const ExecutionContext context(step, base::Microbatch(microbatch), schedule::Phase::kStart, /*seed=*/1);
    const c10::InferenceMode inference;
    at::batch_norm(at::ones({4, kChannels}, options), {}, {}, norm.mean, norm.var, trains, 0.1, 1e-5, false);
  };
  call(0, /*trains=*/true);
  EXPECT_THROW(call(1, /*trains=*/false), base::UsageError);
  step.statistics.end(/*keep=*/false);
}

}  // namespace
}  // namespace lamina::runtime
