// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lamina/value/torch_version.h"

namespace lamina::verification {

// The gradients of parameters, as hooks of the parameters have left them, each added up over several backwards. What
// `.grad` had before does not count. Thread-safe.
class ParameterGradients {
 public:
  using Named = std::pair<std::string, at::Tensor>;

  // Adds up what backwards of threads give of which `counts` is true. Parameters that are not trained are left out.
  ParameterGradients(std::span<const Named> parameters, std::function<bool()> counts);
  // The parameters are as before.
  ~ParameterGradients();
  ParameterGradients(const ParameterGradients&) = delete;

  // The sums, by the parameters' names; zeros where there was no gradient.
  std::vector<Named> take();

 private:
  struct Hook;
  struct Watched {
    std::string name;
    at::Tensor parameter, sum;
    value::NodePtr<torch::autograd::Node> node;
    const Hook* hook = nullptr;  // the node's
  };

  void add(std::size_t number, const at::Tensor& gradient);

  const std::function<bool()> counts_;
  std::mutex mutex_;
  std::vector<Watched> watched_;
};

}  // namespace lamina::verification
