// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/custom_function.h>

#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>
#include <vector>

#include "benchmarks/simulated_step.h"
#include "lamina/config/config.h"
#include "lamina/environment/world.h"

// A stage that sleeps instead of computing, and what its schedules should take.
namespace lamina::bench {

using Clock = std::chrono::steady_clock;

inline constexpr std::chrono::milliseconds kForward(10), kBackward(20), kWeights(10);  // the last: of the backward

struct Sleep : torch::autograd::Function<Sleep> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, std::int64_t forward_ms,
                            std::int64_t backward_ms) {
    context->saved_data["backward_ms"] = backward_ms;
    std::this_thread::sleep_for(std::chrono::milliseconds(forward_ms));
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    std::this_thread::sleep_for(std::chrono::milliseconds(context->saved_data["backward_ms"].toInt()));
    return {gradients[0], {}, {}};
  }
};

// The gradient of the weight is a node of its own, and all of the backward where nobody wants that of x.
inline at::Tensor stage(const at::Tensor& x, const at::Tensor& weight) {
  const auto weights = x.requires_grad() ? kWeights : kBackward;
  return Sleep::apply(x, kForward.count(), (kBackward - weights).count()) + Sleep::apply(weight, 0, weights.count());
}

inline at::Tensor microbatch() { return at::ones({1, 1024}); }

// Times of an operation with nothing around it: forward, and forward and backward.
inline std::pair<double, double> alone() {
  const auto weight = at::full({1}, 1.0).set_requires_grad(true);
  std::vector<double> forwards, both;
  for (int i = 0; i < 10; ++i) {
    const auto x = microbatch().set_requires_grad(true);
    const auto begin = Clock::now();
    const auto y = stage(x, weight);
    forwards.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    y.sum().backward();
    both.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return {median(forwards), median(both)};
}

// The line that a step is printed as: its seconds, those of the ideal, and those simulated.
inline void print(const config::Config& config, double seconds, std::pair<double, double> alone) {
  const auto [forward, both] = alone;
  const double ideal = (config.microbatches + config.partitions - 1) * both;
  std::printf("%.9f %.9f %.9f\n", seconds, ideal, simulated(config, forward, both));
}

// Arguments of `bench MICROBATCHES SCHEDULE WINDOW STEPS`; the partitions are the ranks of the job.
inline config::Config configured(char** arguments) {
  config::Config config;
  config.partitions = environment::read_world(environment::process_environment()).size;
  read_schedule(config, arguments + 1);
  return config;
}

}  // namespace lamina::bench
