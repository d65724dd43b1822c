// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/tracer.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "lamina/base/deadline.h"
#include "lamina/frontend/calls.h"
#include "lamina/frontend/recording.h"
#include "lamina/runtime/process_state.h"

namespace lamina::frontend {
namespace {

using base::Clock;

constexpr int kRuns = 4;  // the first, which finds caches cold, does not count
constexpr auto kEnough = std::chrono::seconds(10);

// The model's buffers and the process's random numbers, put back at the end.
class StateRestorer {
 public:
  explicit StateRestorer(const TorchModuleTree& tree) : tree_(tree), state_(runtime::ProcessState::current()) {
    for (const auto& buffer : tree.buffers()) values_.push_back(buffer.tensor.detach().clone());
  }
  ~StateRestorer() {
    state_.swap();
    for (std::size_t i = 0; i < values_.size(); ++i) {
      if (!values_[i].equal(tree_.buffers()[i].tensor)) tree_.buffers()[i].tensor.detach().copy_(values_[i]);
    }
  }
  StateRestorer(const StateRestorer&) = delete;

 private:
  const TorchModuleTree& tree_;
  runtime::ProcessState state_;
  std::vector<at::Tensor> values_;
};

std::vector<Cost> run(const TorchModuleTree& tree, const Example& example) {
  value::Value arguments = example.arguments;
  value::for_each_tensor(arguments, [](at::Tensor& tensor) {
    if (tensor.defined()) tensor = tensor.detach().clone();
  });
  Recording one(tree);
  one.returned(0, call_kind(example.kind)(*tree.root(), std::move(arguments)));
  return one.finish();
}

void forget_times(Cost& cost) {
  cost.forward_us = std::numeric_limits<double>::infinity();
  for (auto& stretch : cost.stretches) {
    stretch.forward_us = std::numeric_limits<double>::infinity();
    stretch.weights_us = std::numeric_limits<double>::infinity();
  }
}

// A model that takes another way each time has the times of its last run.
void keep_shortest(Cost& cost, const Cost& again) {
  cost.forward_us = std::min(cost.forward_us, again.forward_us);
  if (cost.stretches.size() != again.stretches.size()) cost.stretches = again.stretches;
  for (std::size_t i = 0; i < again.stretches.size(); ++i) {
    auto& stretch = cost.stretches[i];
    stretch.forward_us = std::min(stretch.forward_us, again.stretches[i].forward_us);
    stretch.weights_us = std::min(*stretch.weights_us, *again.stretches[i].weights_us);
  }
}

}  // namespace

std::vector<Cost> trace(const TorchModuleTree& tree, const Example& example) {
  const at::NoGradGuard no_grad;
  const StateRestorer restorer(tree);
  const auto began = Clock::now();
  std::vector<Cost> costs = run(tree, example);
  for (auto& cost : costs) forget_times(cost);
  for (int i = 1; i < kRuns && (i < 2 || Clock::now() - began < kEnough); ++i) {
    const auto again = run(tree, example);
    for (std::size_t node = 0; node < costs.size(); ++node) {
      keep_shortest(costs[node], again[node]);
    }
  }
  for (auto& cost : costs) {
    cost.backward_us = 2 * cost.forward_us;
    for (auto& stretch : cost.stretches) stretch.backward_us = 2 * stretch.forward_us;
  }
  return costs;
}

}  // namespace lamina::frontend
