// SPDX-License-Identifier: Apache-2.0
// The schedule on emulated devices, without Python: a chain of one stage per rank, whose operation sleeps 10 ms forward
// and 20 ms backward; the loss is computed on rank 0.
//
//     lamina run -n P -c schedule_bench M SCHEDULE WINDOW STEPS      (WINDOW 0: the default)
//
// Rank 0 prints, for each step after two that are not counted, its seconds, from rank 0's entry until its end; those of
// the ideal (m + p - 1)(tf + tb), the operations measured alone; and those of the same schedule simulated with them.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "benchmarks/bench_session.h"
#include "lamina/base/error.h"
#include "lamina/plan/simulation.h"

namespace {

using namespace lamina;
using bench::Clock;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::chrono::milliseconds kForward(10), kBackward(20);

struct Sleep : torch::autograd::Function<Sleep> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x, const at::Tensor&) {
    std::this_thread::sleep_for(kForward);
    return x.clone();
  }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    std::this_thread::sleep_for(kBackward);
    return {gradients[0], gradients[0].slice(1, 0, 1).reshape({1})};
  }
};

value::Value stage(const value::Value& x) {
  thread_local const at::Tensor weight = at::full({1}, 1.0).set_requires_grad(true);
  return Sleep::apply(x.as<at::Tensor>(), weight);
}

at::Tensor microbatch() { return at::ones({1, 1024}); }

double median(std::vector<double> samples) {
  std::ranges::sort(samples);
  return samples[samples.size() / 2];
}

// What an operation takes with nothing around it: forward, and forward and backward.
std::pair<double, double> alone() {
  std::vector<double> forwards, both;
  for (int i = 0; i < 10; ++i) {
    const auto x = microbatch().set_requires_grad(true);
    const auto begin = Clock::now();
    const auto y = stage(x).as<at::Tensor>();
    forwards.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    y.sum().backward();
    both.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return {median(forwards), median(both)};
}

// Messages take up to 0.1 ms, at random: exactly equal times would make every tie fall the same way.
double simulated(const base::Config& config, double forward, double both) {
  std::mt19937 random(1);
  plan::Chain chain = plan::even_chain(config.partitions, config.microbatches, static_cast<std::int64_t>(1e9 * forward),
                                       static_cast<std::int64_t>(1e9 * (both - forward)));
  chain.delay = [&] { return static_cast<std::int64_t>(random() % 100'000); };
  const auto name = config.schedule == base::Schedule::kSimple ? "simple" : "interleaved";
  const auto schedule = plan::make_schedule(name, *base::with_defaults(config).active_microbatches);
  std::vector<double> times;
  for (int i = 0; i < 25; ++i) times.push_back(1e-9 * static_cast<double>(plan::step_time(*schedule, chain)));
  return median(times);
}

void run(const base::Config& config, int steps) {
  bench::BenchSession session(config);
  std::vector<base::ModuleId> stages;
  for (int i = 0; i < config.partitions; ++i) stages.push_back(session.add("stage" + std::to_string(i), i, stage));
  const auto body = [&](base::Microbatch) {
    value::Value x = microbatch();
    for (const auto id : stages) x = session.job().call(id, std::move(x));
    const auto loss = x.as<at::Tensor>().mean();
    session.job().backward({loss}, {}, 1.0 / config.microbatches);
    return value::Value(loss.detach());
  };
  for (int i = 0; i < steps + 2; ++i) {
    const auto [forward, both] = session.leads() ? alone() : std::pair(0.0, 0.0);  // the others wait in the step
    const double seconds = session.step(body);
    const double ideal = (config.microbatches + config.partitions - 1) * both;
    if (session.leads() && i >= 2) std::printf("%.9f %.9f %.9f\n", seconds, ideal, simulated(config, forward, both));
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) {
    std::fputs("usage: lamina run -n P -c schedule_bench M SCHEDULE WINDOW STEPS\n", stderr);
    return 2;
  }
  base::Config config;
  config.partitions = base::read_world(base::process_environment()).size;
  config.microbatches = std::atoi(arguments[1]);
  config.schedule = std::string(arguments[2]) == "simple" ? base::Schedule::kSimple : base::Schedule::kInterleaved;
  if (const int window = std::atoi(arguments[3])) config.active_microbatches = window;
  run(config, std::atoi(arguments[4]));
  return 0;
}
