// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <utility>
#include <vector>

#include "lamina/collective/ranks.h"

namespace lamina::distributed_optimizer {

// [Note: beside the model] An optimizer may have parameters that are not the model's, as of a loss. Every rank has all
// of them, and begins with the values of the job's first rank. In a pipeline their gradients come on the rank that
// leads it: it alone has them in its groups, and gives the others their values after each update. The copies of that
// rank average the gradients with those of the model's parameters.

class Beside {
 public:
  explicit Beside(collective::Ranks ranks) : ranks_(std::move(ranks)) {}

  // Collective over the world: gives those that are new here the values of its first rank. Throws base::UsageError, on
  // all, where ranks do not have the same ones.
  void take(std::span<const at::Tensor> parameters);
  // Collective over the ranks of a pipeline, where there are any: gives them the values that an update has given those
  // of the rank that leads.
  void bring() const;
  const std::vector<at::Tensor>& all() const { return all_; }
  bool are_updated_here() const { return ranks_.leads(); }

 private:
  const collective::Ranks ranks_;
  std::vector<at::Tensor> all_;
};

}  // namespace lamina::distributed_optimizer
