// SPDX-License-Identifier: Apache-2.0
// schedule_bench as a user of the C++ face would write it: a torch::nn model of one stage per rank, cut and called as
// lamina::Child. Same arguments, same output.
#include <torch/nn/module.h>

#include <cstdio>

#include "benchmarks/sleeping_stage.h"
#include "lamina/lamina.h"

namespace {

using namespace lamina;

struct StageImpl : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", at::full({1}, 1.0));
  at::Tensor forward(const at::Tensor& x) { return bench::stage(x, weight); }
};
TORCH_MODULE(Stage);

struct StagesImpl : torch::nn::Module {
  ChildList<Stage> stages;
  explicit StagesImpl(int count) {
    register_module("stages", stages);
    for (int i = 0; i < count; ++i) {
      const Partition on(i);
      stages->push_back(Stage());
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& stage : *stages) x = stage(x);
    return x.mean();
  }
};
TORCH_MODULE(Stages);

void run(const config::Config& config, int steps) {
  init(config::to_json(config));
  DistributedModel model(Stages(config.partitions));
  const auto train = step([&] {
    const auto loss = model(bench::microbatch());
    model.backward(loss);
    return loss;
  });
  const bool leads = pp_rank() == 0;
  for (int i = 0; i < steps + 2; ++i) {
    const auto alone = leads ? bench::alone() : std::pair(0.0, 0.0);  // the others wait in the step
    const auto begin = bench::Clock::now();
    train();
    const double seconds = std::chrono::duration<double>(bench::Clock::now() - begin).count();
    if (leads && i >= 2) bench::print(config, seconds, alone);
  }
  shutdown();
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) {
    std::fputs("usage: lamina run -n P -c cpp_schedule_bench M SCHEDULE WINDOW STEPS\n", stderr);
    return 2;
  }
  run(bench::configured(arguments), std::atoi(arguments[4]));
  return 0;
}
