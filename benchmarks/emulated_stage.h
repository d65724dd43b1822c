// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/config/config.h"
#include "lamina/environment/world.h"
#include "lamina/schedule/simulation.h"

// A stage that sleeps instead of computing, and what a schedule of such stages should take.
namespace lamina::bench {

using Clock = std::chrono::steady_clock;

inline constexpr std::chrono::milliseconds kForward(10), kBackward(20);

struct Sleep : torch::autograd::Function<Sleep> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor&) {
    std::this_thread::sleep_for(kForward);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    std::this_thread::sleep_for(kBackward);
    return {gradients[0], gradients[0].slice(1, 0, 1).reshape({1})};
  }
};

inline at::Tensor microbatch() { return at::ones({1, 1024}); }

inline double median(std::vector<double> samples) {
  std::ranges::sort(samples);
  return samples[samples.size() / 2];
}

// Times of an operation with nothing around it: forward, and forward and backward.
inline std::pair<double, double> alone() {
  const auto weight = at::full({1}, 1.0).set_requires_grad(true);
  std::vector<double> forwards, both;
  for (int i = 0; i < 10; ++i) {
    const auto x = microbatch().set_requires_grad(true);
    const auto begin = Clock::now();
    const at::Tensor y = Sleep::apply(x, weight);
    forwards.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    y.sum().backward();
    both.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return {median(forwards), median(both)};
}

// Messages take up to 0.1 ms, at random: exactly equal times would make every tie fall the same way.
inline double simulated(const config::Config& config, double forward, double both) {
  std::mt19937 random(1);
  schedule::Chain chain =
      schedule::even_chain(config.partitions, config.microbatches, static_cast<std::int64_t>(1e9 * forward),
                           static_cast<std::int64_t>(1e9 * (both - forward)));
  chain.delay = [&] { return static_cast<std::int64_t>(random() % 100'000); };
  const auto name = config.schedule == config::Schedule::kSimple ? "simple" : "interleaved";
  const auto schedule = schedule::make_schedule(name, *config::with_defaults(config).active_microbatches);
  std::vector<double> times;
  for (int i = 0; i < 25; ++i) times.push_back(1e-9 * static_cast<double>(schedule::step_time(*schedule, chain)));
  return median(times);
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
  config.microbatches = std::atoi(arguments[1]);
  config.schedule = std::string(arguments[2]) == "simple" ? config::Schedule::kSimple : config::Schedule::kInterleaved;
  if (const int window = std::atoi(arguments[3])) config.active_microbatches = window;
  return config;
}

}  // namespace lamina::bench
