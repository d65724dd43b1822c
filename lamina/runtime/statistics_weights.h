// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

namespace lamina::runtime {

// Weighs what microbatches have folded into running statistics, one after the other, by how often they have called.
// Tensors have a double for each module, on the device of the counts, which the host does not wait for.
class StatisticsWeights {
 public:
  // `found`: the counts that the step found. Statistics without a momentum are the mean over all calls.
  StatisticsWeights(const std::vector<std::optional<double>>& momenta, at::Tensor found);

  // Factors of each module, after a microbatch: own * what that has + sum * what there was - before * what the step
  // found.
  struct Factors {
    at::Tensor own, sum, before;
  };
  // Tells which modules' statistics a microbatch has changed, as bools.
  using Changed = std::function<at::Tensor()>;
  // `after`: the counts of the next microbatch.
  Factors next(const at::Tensor& after, const Changed& changed);

  // The counts after these microbatches.
  const at::Tensor& counts() const { return counts_; }

 private:
  Factors next_on_host(const at::Tensor& after, const Changed& changed);

  at::Tensor found_, counts_;
  at::Tensor kept_by_call_;  // 1 - momentum
  at::Tensor has_momentum_;  // bools
};

}  // namespace lamina::runtime
