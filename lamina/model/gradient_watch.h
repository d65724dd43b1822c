// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace lamina::model {

// [Note: watched gradients] A backward is noticed by the nodes in which autograd accumulates the gradients of
// parameters. Torch makes a parameter another node when it gets values of another type, device or shape
// (`model.float()`, `p.data = ...`), and a program may put another parameter in its place. So a watcher notes before
// each forward what the parameters are then, and learns later of a node that it has not heard of.
//
// Hears of gradients that come to parameters. For one thread; who hears may be called from any.
class GradientWatch {
 public:
  using Hear = std::function<void(const at::Tensor& parameter)>;
  explicit GradientWatch(Hear hear);
  ~GradientWatch();

  // From now on these, as they are now, and no others. Returns true where one has a gradient that came, maybe, while
  // nobody watched it.
  bool watch(std::span<const at::Tensor> parameters);

 private:
  struct Watched;  // keeps torch's types out of this header

  std::shared_ptr<const Hear> hear_;
  std::vector<Watched> all_;  // in the order in which they were given
};

}  // namespace lamina::model
