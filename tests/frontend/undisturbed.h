// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "lamina/base/str.h"
#include "lamina/lamina.h"
#include "tests/frontend/expect.h"

// A training, for programs of which some ranks are killed, and what it is in one process that nobody disturbs.
namespace lamina::frontend::test {

constexpr int kRows = 12;

inline at::Tensor batch(int number) {
  torch::manual_seed(1000 + number);
  return torch::randn({kRows, 6}, torch::kDouble);
}

template <class Net>
Net made() {
  torch::manual_seed(3);
  Net net;
  net->to(torch::kDouble);
  return net;
}

inline torch::optim::AdamWOptions options() { return torch::optim::AdamWOptions(0.02).weight_decay(0.1); }

struct Schedule : torch::optim::StepLR {
  explicit Schedule(torch::optim::Optimizer& optimizer) : StepLR(optimizer, 3, 0.5) {}
  Value state() const { return to_value(static_cast<std::int64_t>(step_count_)); }
  void take(const Value& state) { step_count_ = static_cast<unsigned>(from_value<std::int64_t>(state)); }
};

// The loss of a batch of which each copy has its part.
template <class Step>
double loss_of(Step& step, int number) {
  const auto own = step(batch(number).chunk(dp_size())[dp_rank()]).reduce_mean().template item<double>();
  const auto all = all_gather(Group::kDp, own);
  double loss = 0;
  for (const auto each : all) loss += each / static_cast<double>(all.size());
  return loss;
}

// Expects the losses from that step on, and the parameters, of one process.
template <class Net, class State>
void expect_undisturbed(const std::vector<double>& losses, int first, const State& state) {
  auto model = made<Net>();
  torch::optim::AdamW optimizer(model->parameters(), options());
  Schedule schedule(optimizer);
  for (int number = 0; number < static_cast<int>(losses.size()); ++number) {
    optimizer.zero_grad();
    auto loss = model->forward(batch(number));
    loss.backward();
    optimizer.step();
    schedule.step();
    if (number < first) continue;
    expect(std::abs(losses[number] - loss.template item<double>()) < 1e-12, base::str("the loss of step ", number));
  }
  for (const auto& item : model->named_parameters()) {
    expect(torch::allclose(state[item.key()], item.value(), 1e-12, 1e-12), item.key());
  }
}

}  // namespace lamina::frontend::test
