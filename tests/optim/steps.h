// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lamina/optim/registry.h"
#include "lamina/optim/step.h"

namespace lamina::optim {

using GivenHyper = std::vector<std::pair<std::string_view, fused::HyperValue>>;

// An optimizer of ours with the states of its parameters.
struct Optimizer {
  explicit Optimizer(const std::string& name, const GivenHyper& given = {})
      : functional(Registry().find(name)), hyper(fused::hyper_values(functional->declaration(), given)) {}

  void step(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& gradients) {
    states.resize(parameters.size());
    optim::step(*functional, hyper, parameters, gradients, states, threads);
  }

  std::shared_ptr<const Functional> functional;
  std::vector<double> hyper;
  std::vector<State> states = {};
  Threads threads{2};
};

}  // namespace lamina::optim
